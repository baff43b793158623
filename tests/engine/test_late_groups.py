"""Parameter groups that are added between steps: the numbers of plain torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from tests import models
from tests.ranks import RankPool

STEPS = 6
LATE = 2  # the first step with another group
Make = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.9, weight_decay=0.1)


def build() -> Any:
    torch.manual_seed(0)
    model = models.mlp().double()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    return model


def later(model: Any) -> dict[int, list[dict[str, Any]]]:
    """Groups by the step before which they come: a whole block, then parts of two units."""
    return {
        LATE: [{"params": list(model.layers[0].parameters())}],
        LATE + 1: [{"params": [model.layers[1].weight, model.first.bias], "lr": 0.05}, {"params": model.first.weight}],
    }


@dataclass(frozen=True)
class Case:
    make: Make = adamw
    stage: int = 0
    route: str = "auto"
    clip: float = 0.0
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    ema: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "communication": {"route": self.route},
            "steps_per_print": 0,
        }

    def batches(self, step: int, rank: int) -> Iterator[tuple[Tensor, ...]]:
        for microbatch in range(self.accumulation):
            yield models.vector_batch_float64(100 * step + 10 * rank + microbatch, 2)


def add(model: Any, optimizer: Any, step: int) -> None:
    for group in later(model).get(step, []):
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for param in params:
            param.requires_grad_(True)
        optimizer.add_param_group(group)


def train(case: Case, folder: Path | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and the state at the end. folder: of a checkpoint between the groups, from which another engine goes on."""

    def made(until: int) -> tuple[Any, lowtide.Engine]:
        model = build()
        engine = lowtide.initialize(model, case.config(), optimizer=case.make(model.last.parameters()))
        if case.ema:
            engine.ema(0.5)
        for step in range(until):
            add(model, engine.optimizer, step)
        return model, engine

    model, engine = made(0)
    norms, rank = [], dist.get_rank() if dist.is_initialized() else 0
    for step in range(STEPS):
        if folder is not None and step in (LATE, LATE + 1, LATE + 2):
            engine.save_checkpoint(folder)
            engine.close()
            model, engine = made(step)
            engine.load_checkpoint(folder)
        add(model, engine.optimizer, step)
        norms.append(engine.train_step(case.batches(step, rank)).grad_norm.item())
    with engine.ema_weights() if case.ema else engine.gathered():
        state = engine.state_dict()
    engine.close()
    return norms, state


def train_all(cases: list[Case], folder: Path | None = None) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(case, None if folder is None else folder / str(index)) for index, case in enumerate(cases)]


def train_plainly(case: Case, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = build(), []
    optimizer = case.make(model.last.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        add(model, optimizer, step)
        model.zero_grad()
        for rank in range(world_size):
            for batch in case.batches(step, rank):
                (model(*batch) / (world_size * case.accumulation)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or torch.inf)
        norms.append(norm.item())
        optimizer.step()
        averaged.update_parameters(model)
    return norms, (averaged.module if case.ema else model).state_dict()


def check(found: list[tuple[list[float], dict[str, Tensor]]], cases: list[Case], world_size: int) -> None:
    for (norms, state), case in zip(found, cases, strict=True):
        expected_norms, expected = train_plainly(case, world_size)
        close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9, msg=lambda text, case=case: f"{case}: {text}")
        close(norms, expected_norms)
        close(state, dict(expected))


def grid(**changes: Any) -> list[Case]:
    return [
        Case(make, stage, clip=clip, accumulation=accumulation, **changes)
        for stage, accumulation in ((0, 1), (1, 2), (2, 2), (3, 1))
        for make, clip in ((adamw, 0.05), (rmsprop, 0.0))
    ]


def elsewhere(folder: Path) -> list[Case]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    zeros: list[dict[str, Any]] = [
        {"offload_optimizer": nvme},
        {"offload_optimizer": {**nvme, "overlap": "speculative"}},
        {"offload_param": nvme},
        {"update_in_backward": True},
    ]
    return [Case(stage=3, zero=zero) for zero in zeros]


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_that_come_later(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    cases = [*grid(), *elsewhere(tmp_path), Case(ema=True, stage=2)]
    if world_size > 1:
        cases += grid(route="sockets")
    check(ranks(world_size, train_all, cases, None)[0], cases, world_size)


def test_checkpoints_between_them(ranks: RankPool, tmp_path: Path) -> None:
    """Of an engine that has the same groups, in the same order, whenever it has got them."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    cases = [
        Case(),
        Case(rmsprop, 3),
        Case(stage=3, route="sockets", zero={"offload_optimizer": nvme}),
        Case(stage=1, ema=True),
    ]
    check(ranks(2, train_all, cases, tmp_path)[0], cases, 2)
