"""Parameter groups that are added between steps: the numbers of plain torch."""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool

STEPS = 4
LATE = 1  # the first step with another group
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


def groups_of(model: Any) -> dict[int, list[dict[str, Any]]]:
    """Groups by the step before which they come: a whole block, then parts of two units."""
    return {
        LATE: [{"params": list(model.layers[0].parameters())}],
        LATE + 1: [{"params": [model.layers[1].weight, model.first.bias], "lr": 0.05}, {"params": model.first.weight}],
    }


@dataclass(frozen=True)
class Case:
    make: Make = adamw
    stage: int = 0
    transport: str = "auto"
    clip: float = 0.0
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    ema: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "communication": {"transport": self.transport},
            "steps_per_print": 0,
            **self.more,
        }

    def batches(self, step: int, rank: int) -> Iterator[tuple[Tensor, ...]]:
        for microbatch in range(self.accumulation):
            yield models.vector_batch_float64(100 * step + 10 * rank + microbatch, 2)


def add(later: dict[int, list[dict[str, Any]]], optimizer: Any, step: int) -> None:
    for group in later.get(step, []):
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for param in params:
            param.requires_grad_(True)
        optimizer.add_param_group(group)


def train(case: Case, folder: Path | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and the state at the end. folder: of a checkpoint between the groups, from which another engine goes on."""

    def made(until: int) -> tuple[dict[int, list[dict[str, Any]]], lowtide.Engine]:
        model = build()
        later = groups_of(model)
        engine = lowtide.initialize(model, case.config(), optimizer=case.make(model.last.parameters()))
        if case.ema:
            engine.ema(0.5)
        for step in range(until):
            add(later, engine.optimizer, step)
        return later, engine

    later, engine = made(0)
    norms, rank = [], engine.data_rank
    for step in range(STEPS):
        if folder is not None and step in (LATE + 1, LATE + 2):
            engine.save_checkpoint(folder)
            engine.close()
            later, engine = made(step)
            engine.load_checkpoint(folder)
        add(later, engine.optimizer, step)
        norms.append(engine.train_step(case.batches(step, rank)).grad_norm.item())
    with engine.ema_weights() if case.ema else nullcontext():
        state = engine.state_dict()
    engine.close()
    return norms, state


def train_all(cases: list[Case], folder: Path | None = None) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(case, None if folder is None else folder / str(index)) for index, case in enumerate(cases)]


def train_plainly(case: Case, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = build(), []
    later = groups_of(model)
    optimizer = case.make(model.last.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        add(later, optimizer, step)
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
        try:
            torch.testing.assert_close((norms, state), (expected_norms, dict(expected)), rtol=1e-9, atol=1e-9)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


STAGES = [
    Case(adamw, 0, "sockets", clip=0.05),
    Case(rmsprop, 1, accumulation=2),
    Case(adamw, 2, clip=0.05, accumulation=2),
    Case(rmsprop, 3, "sockets"),
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
    """On one rank every second of the cases."""
    cases = [*STAGES, *elsewhere(tmp_path), Case(ema=True, stage=2)][:: 3 - world_size]
    check(ranks(world_size, train_all, cases, None)[0], cases, world_size)


def test_over_several_axes(ranks: RankPool) -> None:
    cases = [
        Case(stage=2, clip=0.05, zero={"shard_size": 2}),
        Case(stage=3, transport="sockets", zero={"zero_hpz_partition_size": 2}),
    ]
    check(ranks(4, train_all, cases, None)[0], cases, 4)


def test_checkpoints_between_them(ranks: RankPool, tmp_path: Path) -> None:
    """Of an engine that has the same groups, in the same order, whenever it has got them."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    cases = [
        Case(rmsprop, 3),
        Case(stage=3, transport="sockets", zero={"offload_optimizer": nvme}),
        Case(stage=1, ema=True),
    ]
    check(ranks(2, train_all, cases, tmp_path)[0], cases, 2)


def test_in_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    """The caller has the parameters of all stages from the model that he gave."""
    more = {"parallel": {"pipeline": 2}}
    for stage, folder in ((3, None), (0, tmp_path)):
        cases = [Case(stage=stage, accumulation=2, clip=0.05, more=more)]
        check(ranks(2, train_all, cases, folder)[0], cases, 1)


def test_masters_begin_with_what_is_computed_with(ranks: RankPool, tmp_path: Path) -> None:
    """The same bits at every stage, wherever masters and states rest, and with updates that come late."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    half = {"bf16": {"enabled": True}}
    delayed = {"overlap": "delayed", "delay_after_steps": 1}
    cases = [
        Case(more=half),
        Case(stage=2, more=half),
        Case(stage=3, transport="sockets", zero={"offload_optimizer": nvme, "offload_param": nvme}, more=half),
        Case(stage=1, zero={"offload_optimizer": {"device": "cpu", **delayed}}, more=half),
        Case(stage=3, transport="sockets", zero={"offload_optimizer": {**nvme, **delayed}}, more=half),
    ]
    found = ranks(2, train_all, cases, None)[0]
    for one in found[1:3]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[4], found[3], rtol=0, atol=0)


SGD = {"optimizer": {"type": "sgd", "params": {"lr": 0.1}}}
LINEAR = {"scheduler": {"type": "linear", "params": {"total_num_steps": 10}}}


def halve(step: int) -> float:
    return 0.5**step


def rates(engine: lowtide.Engine, model: Any, before: Callable[[], Any] = lambda: None) -> list[list[float]]:
    """Before each step; a group comes before the third. before: is called before that."""
    found = []
    for step in range(4):
        if step == 2:
            before()
            engine.optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.8})
        found.append([group["lr"] for group in engine.optimizer.param_groups])
        engine.train_step(models.vector_batch_float64(step, 2))
    return found


def test_the_schedule_of_the_config_takes_a_group_up() -> None:
    model = build()
    with lowtide.initialize(model, Case(more={**SGD, **LINEAR}).config()) as engine:
        found = rates(engine, model)
    assert list(chain(*found)) == pytest.approx([0.1, 0.09, 0.08, 0.64, 0.07, 0.56])


def test_schedulers_of_torch() -> None:
    """One that goes on from each group's own rate takes it up; one with a list says so before anything is changed."""
    model = build()
    make = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with lowtide.initialize(model, Case(more=SGD).config(), lr_scheduler=make) as engine:
        assert list(chain(*rates(engine, model))) == pytest.approx([0.1, 0.05, 0.025, 0.8, 0.0125, 0.4])
    model = build()
    make_of_list = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=halve)
    with lowtide.initialize(model, Case(more=SGD).config(), lr_scheduler=make_of_list) as engine:
        scheduler = engine.lr_scheduler
        with pytest.raises(
            ValueError, match=r"expected an lr_scheduler that works with a new group, found that LambdaLR"
        ):
            rates(engine, model)
        assert len(engine.optimizer.param_groups) == 1 and scheduler.last_epoch == 2

        def extend() -> None:
            scheduler.base_lrs.append(0.8)
            scheduler.lr_lambdas.append(halve)

        found = rates(engine, model, extend)
    assert list(chain(*found[2:])) == pytest.approx([0.1 / 16, 0.8, 0.1 / 32, 0.8 / 32])


Refusal = tuple[Callable[[Any], Any], type[Exception], str]
REFUSALS: list[Refusal] = [
    (lambda model: [], ValueError, "expected parameters of the model, found none"),
    (lambda model: [nn.Parameter(torch.zeros(2))], ValueError, "found a Parameter of another module"),
    (lambda model: model.last.weight, ValueError, "in no group, found 'last.weight' of group 0"),
    (lambda model: [model.first.bias] * 2, ValueError, "in no group, found 'first.bias' of group 1"),
    (lambda model: {model.first.bias}, TypeError, "expected parameters in the same order on all ranks, found a set"),
    (lambda model: [model.table], ValueError, "of floating-point numbers, found 'table' of torch.int64"),
]


@pytest.mark.parametrize(("choose", "error", "words"), REFUSALS)
def test_what_cannot_be_in_a_group(choose: Any, error: type[Exception], words: str) -> None:
    model = build()
    model.table = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with lowtide.initialize(model, Case().config(), optimizer=adamw(model.last.parameters())) as engine:
        with pytest.raises(error, match=words):
            engine.optimizer.add_param_group({"params": choose(model)})
        assert len(engine.optimizer.param_groups) == 1
        engine.train_step(models.vector_batch_float64(0, 2))


def test_options_of_another_update_are_refused() -> None:
    model = build()
    words = "expected options of adamw with the states of the first group, found {'amsgrad': True"
    with (
        lowtide.initialize(model, Case().config(), optimizer=adamw(model.last.parameters())) as engine,
        pytest.raises(ValueError, match=words),
    ):
        engine.optimizer.add_param_group({"params": [model.first.bias], "amsgrad": True})


def test_times_at_which_no_group_is_taken() -> None:
    model = build()
    config = Case(stage=3, accumulation=2).config()
    batch = models.vector_batch_float64(0, 2)
    with lowtide.initialize(model, config, optimizer=adamw(model.last.parameters())) as engine:

        def refused(words: str) -> None:
            with pytest.raises(StateError, match=words):
                engine.optimizer.add_param_group({"params": list(model.first.parameters())})

        engine.backward(engine(*batch))
        refused("expected a call between steps, found 1 microbatches of a step done")
        engine.zero_grad()
        with engine.no_sync():
            refused(r"found it inside of engine.no_sync\(\)")
        with engine.gathered():
            refused(
                "expected no gathered parameters, found 'first.weight' gathered; call it outside of `with "
                r"engine.gathered\(\):` \(zero.GatheredParameters in lowtide.deepspeed\)"
            )
        with engine.join():
            refused("outside of `with engine.join")
        handle = model.last.register_forward_hook(
            lambda *args: refused(
                r"expected no call in progress, found engine.train_step\(\): this call comes from inside of it"
            )
        )
        engine.train_step(iter([batch, batch]))
        handle.remove()
        engine.optimizer.add_param_group({"params": list(model.first.parameters())})
        engine.train_step(iter([batch, batch]))


def test_a_graph_of_before_a_group_that_was_divided() -> None:
    """Autograd refuses it where its weights may be gone, as after a step; where they stay it is as in torch."""
    model = build()
    model.first.requires_grad_(True)
    with lowtide.initialize(model, Case(stage=3).config(), optimizer=adamw(model.first.parameters())) as engine:
        loss = engine(*models.vector_batch_float64(0, 2))
        engine.optimizer.add_param_group({"params": [model.layers[1].weight]})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
        engine.train_step(models.vector_batch_float64(0, 2))


def different_parameters(model: Any, rank: int) -> dict[str, Any]:
    return {"params": [model.first.weight if rank else model.first.bias]}


def different_options(model: Any, rank: int) -> dict[str, Any]:
    return {"params": [model.first.bias], "lr": float(rank)}


def add_differently(choose: Any) -> None:
    model = build()
    with lowtide.initialize(model, Case().config(), optimizer=adamw(model.last.parameters())) as engine:
        engine.optimizer.add_param_group(choose(model, engine.rank))


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (different_parameters, r"found \['first.bias'\] on rank 0, \['first.weight'\] on rank 1"),
        (different_options, r"found .*lr=0.0, .* on rank 0, .*lr=1.0, .* on rank 1"),
    ],
)
def test_ranks_that_add_another_group(ranks: RankPool, choose: Any, words: str) -> None:
    for failure in ranks.fails(2, add_differently, choose):
        assert failure.kind == "RuntimeError"
        assert re.search(words, failure.text)
