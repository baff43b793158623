"""Parameter groups over some of the parameters, and over frozen ones: the numbers of plain torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.engine.blueprint.optimizer_plan import OptimizerPlan
from lowtide.engine.config.config import Config
from tests.kit import models
from tests.kit.ranks import RankPool

STEPS = 5
Make = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.9, weight_decay=0.1)


def build() -> Any:
    torch.manual_seed(0)
    return models.mlp().double()


def some(model: Any, make: Make) -> torch.optim.Optimizer:
    """Of the blocks, and the bias of the last layer: in two groups, and not in the model's order."""
    return make([{"params": [model.last.bias], "lr": 0.1}, {"params": list(model.layers.parameters())[::-1]}])


def all_of_it(model: Any, make: Make) -> torch.optim.Optimizer:
    return make(model.parameters())


def nothing(model: Any, step: int) -> None: ...


def unfreeze(model: Any, step: int) -> None:
    """A block a step; then one is frozen again."""
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index <= step and not (index == 0 and step == 4))


@dataclass(frozen=True)
class Case:
    """before_step: told of each; the model is as it leaves it at step 0 when the engine is made."""

    choose: Callable[[Any, Make], torch.optim.Optimizer]
    before_step: Callable[[Any, int], None] = nothing
    make: Make = adamw
    stage: int = 0
    transport: str = "auto"
    clip: float = 0.0
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "communication": {"transport": self.transport},
            "steps_per_print": 0,
        }

    def batches(self, step: int, rank: int) -> Iterator[tuple[Tensor, ...]]:
        for microbatch in range(self.accumulation):
            yield models.vector_batch_float64(100 * step + 10 * rank + microbatch, 2)


def train(case: Case, folder: Path | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and the state at the end. folder: of a checkpoint, from which another engine goes on in the middle."""

    def made() -> tuple[Any, lowtide.Engine]:
        model = build()
        case.before_step(model, 0)
        return model, lowtide.initialize(model, case.config(), optimizer=case.choose(model, case.make))

    model, engine = made()
    norms, rank = [], dist.get_rank() if dist.is_initialized() else 0
    for step in range(STEPS):
        if folder is not None and step == 3:
            engine.save_checkpoint(folder)
            engine.close()
            model, engine = made()
            engine.load_checkpoint(folder)
        case.before_step(model, step)
        norms.append(engine.train_step(case.batches(step, rank)).grad_norm.item())
    state = engine.state_dict()
    engine.close()
    return norms, state


def train_all(cases: list[Case], folder: Path | None = None) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(case, None if folder is None else folder / str(index)) for index, case in enumerate(cases)]


def train_plainly(case: Case, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = build(), []
    case.before_step(model, 0)
    optimizer = case.choose(model, case.make)
    for step in range(STEPS):
        case.before_step(model, step)
        model.zero_grad()
        for rank in range(world_size):
            for batch in case.batches(step, rank):
                (model(*batch) / (world_size * case.accumulation)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or torch.inf)
        norms.append(norm.item())
        optimizer.step()
    return norms, model.state_dict()


def check(found: list[tuple[list[float], dict[str, Tensor]]], cases: list[Case], world_size: int) -> None:
    for (norms, state), case in zip(found, cases, strict=True):
        expected_norms, expected = train_plainly(case, world_size)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-9, atol=1e-9, msg=f"{case}: {{}}".format)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=f"{case} {name}: {{}}".format)


def grid(choose: Callable[[Any, Make], torch.optim.Optimizer], **changes: Any) -> list[Case]:
    """Every stage; optimizers in turn, which are at the other stages where groups are of all members."""
    kinds = [(adamw, 0.05), (rmsprop, 0.0)][:: 1 if choose is some else -1]
    return [
        Case(choose, make=make, stage=stage, transport=transport, clip=clip, accumulation=accumulation, **changes)
        for (stage, accumulation, transport), (make, clip) in zip(
            ((0, 1, "auto"), (1, 2, "auto"), (2, 2, "sockets"), (3, 1, "sockets")), kinds * 2, strict=True
        )
    ]


def test_what_is_in_no_group_counts_in_the_norm_and_stays(ranks: RankPool, tmp_path: Path) -> None:
    """As for torch's `clip_grad_norm_(model.parameters())` before the step of such an optimizer."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    cases = grid(some)
    cases += [Case(some, stage=3, zero=zero) for zero in ({"offload_optimizer": nvme}, {"offload_param": nvme})]
    cases += [Case(some, stage=2, zero={"update_in_backward": True})]
    check(ranks(2, train_all, cases)[0], cases, 2)


def test_frozen_members_are_unfrozen_later(ranks: RankPool) -> None:
    cases = grid(all_of_it, before_step=unfreeze) + [Case(all_of_it, unfreeze, stage=3)]
    check(ranks(2, train_all, cases)[0], cases, 2)


def test_checkpoints_of_both(ranks: RankPool, tmp_path: Path) -> None:
    cases = [
        Case(choose, before_step, make, stage)
        for choose, before_step, stages in ((some, nothing, (0, 3)), (all_of_it, unfreeze, (3, 0)))
        for make, stage in zip((adamw, rmsprop), stages, strict=True)
    ]
    check(ranks(2, train_all, cases, tmp_path)[0], cases, 2)


def test_what_frozen_members_cost_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    found = [
        OptimizerPlan.of(Config.load({}), model, torch.optim.AdamW(members.parameters())).notes(model)
        for members in (model, model[1])
    ]
    assert found[0][0].startswith("optimizer: 2 of its parameters (6 elements) are frozen. Their gradients")
    assert found[1] == []


def test_parameters_of_another_model_are_refused() -> None:
    model, other = build(), build()
    words = r"optimizer: expected parameters of the model \(10\), found 11 parameters, 1 of them not in the model"
    with pytest.raises(ValueError, match=words):
        lowtide.initialize(model, Case(some).config(), optimizer=adamw([*model.parameters(), other.last.bias]))


def test_groups_added_to_the_callers_optimizer_are_told() -> None:
    """It shares its groups with the engine's, which has no memory for them."""
    model = build()
    optimizer = some(model, adamw)
    with lowtide.initialize(model, Case(some).config(), optimizer=optimizer) as engine:
        optimizer.add_param_group({"params": list(model.first.parameters())})
        words = (
            r"passed to lowtide.initialize have changed: expected \[.*\] parameters in its groups, found "
            r"\[.*, 2\]; add groups with engine.optimizer.add_param_group"
        )
        with pytest.raises(ValueError, match=words):
            engine.train_step(models.vector_batch_float64(0, 2))


def of_rank(model: Any, make: Make) -> torch.optim.Optimizer:
    """Not the same on all ranks."""
    return some(model, make) if dist.get_rank() else all_of_it(model, make)


def test_ranks_that_have_other_groups_are_told(ranks: RankPool) -> None:
    for failure in ranks.fails(2, train_all, [Case(of_rank)]):
        assert failure.kind == "RuntimeError"
        assert "the ranks have different optimizers: parameter 'first.weight' is in group 0 on rank 0" in failure.text
