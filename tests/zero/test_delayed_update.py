"""A delayed update is, to the last bit, that of plain torch with parameters one update behind the master weights.

That no stage and no place of the states changes a bit of it is asked in tests/laws.
"""

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lowtide.kernels.optimizer_step import update_shards
from tests.kit.models import mlp, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, share_of, train_all, trained
from tests.zero.delayed_update import train_delayed
from tests.zero.test_float16 import overflowing_batch

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GPT = Case(short_gpt, token_batch, steps=4)
MLP = Case(mlp, vector_batch, steps=5)


def delayed(case: Case, stage: int, folder: Path, place: str = "cpu", after: int = 0, **changes: Any) -> Case:
    """The case with its updates delayed. changes: of the offload section."""
    section = {"device": place, "overlap": "delayed", "delay_after_steps": after, **changes}
    if place == "nvme":
        section["nvme_path"] = str(folder)
    return case.at(stage, config={"zero_optimization": {"offload_optimizer": section}})


def in_precision(case: Case, precision: str) -> Case:
    return case.at(case.stage, config={"bf16": {"enabled": precision == "bf16"}})


def assert_same(found: Outcome, expected: Outcome, what: object = "") -> None:
    """To the last bit; the norm, whose sum has another order, to a millionth."""
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-6, atol=0, equal_nan=True)
    differing = [name for name, value in expected.state.items() if not torch.equal(found.state[name], value)]
    assert found.losses == expected.losses and differing == [], what


def assert_all_same(ranks: RankPool, cases: list[Case], expected: Outcome, **options: Any) -> list[Outcome]:
    outcomes: list[Outcome] = ranks(2, train_all, cases, **options)[0]
    for case, outcome in zip(cases, outcomes, strict=True):
        assert_same(outcome, expected, case)
    return outcomes


class LateUpdates:
    """Updates end only after the backward of the next step has."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_backwards = 0
        self.num_waits = 0

    def update_shards(self, rule: Any, shards: Any, step: int, *rest: Any, **options: Any) -> None:
        with self._changed:
            self.num_waits += 1
            assert self._changed.wait_for(lambda: self._num_backwards > step, 30)
        update_shards(rule, shards, step, *rest, **options)

    def count_backward(self, number: int = 1) -> None:
        with self._changed:
            self._num_backwards += number
            self._changed.notify_all()


def train_all_with_late_updates(cases: list[Case]) -> list[Outcome]:
    return [train_with_late_updates(case) for case in cases]


def train_with_late_updates(case: Case) -> Outcome:
    late, outcome = LateUpdates(), Outcome()
    with mock.patch("lowtide.zero.fused_update.update_shards", late.update_shards), trained(case, 0) as engine:
        for step in range(case.steps):
            batch = share_of(case.global_batch(step, engine.world_size))
            for part in zip(*(tensor.chunk(case.accumulation) for tensor in batch), strict=True):
                engine.backward(engine(*part))
            late.count_backward()
            result = engine.step()
            outcome.losses.append(result.loss.item())
            outcome.norms.append(result.grad_norm.item())
        late.count_backward(2)
        outcome.state = engine.state_dict()
    assert late.num_waits >= case.steps
    return outcome


@pytest.mark.parametrize(("place", "transport", "first"), [("cpu", "shared_memory", 0), ("nvme", "sockets", 1)])
def test_an_update_reads_and_writes_nothing_that_the_next_step_does(
    ranks: RankPool, tmp_path: Path, place: str, transport: str, first: int
) -> None:
    """Precisions in turn: each stage has both."""
    cases = [
        in_precision(GPT, precision).at(0, config={"communication": {"transport": transport}}) for precision in DTYPES
    ]
    work = [delayed(cases[(stage + first) % 2], stage, tmp_path, place) for stage in STAGES]
    expected = [train_delayed(case, 2, dtype) for case, dtype in zip(cases, DTYPES.values(), strict=True)]
    for stage, found in zip(STAGES, ranks(2, train_all_with_late_updates, work)[0], strict=True):
        assert_same(found, expected[(stage + first) % 2], stage)


@pytest.mark.parametrize(("world_size", "stages"), [(1, STAGES), (2, (2, 3))])
def test_a_late_update_does_not_touch_gradients_that_accumulate(
    ranks: RankPool, tmp_path: Path, world_size: int, stages: tuple[int, ...]
) -> None:
    """Below stage 2 each rank adds its own microbatches first. All microbatches compute with the same parameters."""
    case = GPT.at(0, accumulation=3)
    expected = train_delayed(case, world_size)
    sockets = case.at(0, config={"communication": {"transport": "sockets"}})
    work = [delayed(sockets if stage == 3 else case, stage, tmp_path) for stage in stages]
    for outcome in ranks(world_size, train_all_with_late_updates, work)[0]:
        assert_same(outcome, expected)


def test_it_begins_after_the_updates_that_are_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    first, second = (train_delayed(GPT, 2, delay_after=after) for after in (1, 4))
    for after, expected in ((1, first), (4, second)):
        assert_all_same(ranks, [delayed(GPT, 3, tmp_path, after=after)], expected)
    assert first.losses != second.losses, "a delay must show"


def loud_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """In one step the targets are far away."""
    x, y = vector_batch(step, rows)
    return x, y * (50.0 if step == 2 else 1.0)


def halved_each_step(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def test_the_norm_of_its_own_step_clips_it(ranks: RankPool, tmp_path: Path) -> None:
    """And the learning rate of its own step is that of the update."""
    case, lrs = Case(mlp, loud_batch, clip=20.0, steps=5), [1e-2 * 0.5**step for step in range(5)]
    expected = train_delayed(case, 2, lrs=lrs)
    assert [norm > case.clip for norm in expected.norms] == [False, False, True, False, False]
    (outcome,) = ranks(2, train_all, [delayed(case, 3, tmp_path)], lr_scheduler=halved_each_step)[0]
    assert outcome.lrs == lrs
    for name in ("losses", "norms", "state"):  # the norm's sum has another order
        torch.testing.assert_close(getattr(outcome, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


def test_a_step_that_overflows_takes_over_and_starts_nothing(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(mlp, overflowing_batch, steps=5, config={"fp16": {"enabled": True, "loss_scale": 8}})
    expected = train_delayed(case, 2, torch.float16, loss_scale=8)
    assert expected.skipped == [False, True, False, False, False]
    (outcome,) = ranks(2, train_all, [delayed(case, 3, tmp_path)])[0]
    assert outcome.skipped == expected.skipped and outcome.losses[2:] == expected.losses[2:]
    assert [name for name, value in expected.state.items() if not torch.equal(outcome.state[name], value)] == []


def test_an_optimizer_of_the_caller_s_own_may_be_delayed(ranks: RankPool, tmp_path: Path) -> None:
    case = in_precision(MLP.at(0, config={"optimizer": None}), "bf16")
    rmsprop = partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5)
    expected = train_delayed(case, 2, torch.bfloat16, 2, make_optimizer=rmsprop)
    assert_all_same(ranks, [delayed(case, 3, tmp_path, after=2)], expected, optimizer=rmsprop)
