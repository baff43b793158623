"""Under `engine.join` ranks with fewer batches go on without data: the mean is over the microbatches there were."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowtide import Engine
from lowtide.zero import plan
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import ROWS, Case, Outcome, adamw, assert_close, one_thread, refusal, start
from tests.parallel.test_sequence import Plain

CASE = Case(models.short_gpt_float64, models.token_batch, clip=0.3)
SOCKETS = {"communication": {"transport": "sockets"}}


def batches_of(rank: int, count: int) -> list[tuple[Tensor, ...]]:
    """Those of a rank: no two ranks have one in common."""
    return [CASE.batch(100 * rank + number, ROWS) for number in range(count)]


def by_train_step(engine: Engine, case: Case, own: Sequence[Any]) -> Iterator[Any]:
    for first in range(0, len(own), case.accumulation):
        yield engine.train_step(iter(own[first : first + case.accumulation]))


def by_hand(engine: Engine, case: Case, own: Sequence[Any]) -> Iterator[Any]:
    for number, batch in enumerate(own):
        engine.backward(engine(*batch))
        result = engine.step()
        if number % case.accumulation == case.accumulation - 1:
            yield result


def clipping_by_hand(engine: Engine, case: Case, own: Sequence[Any]) -> Iterator[Any]:
    """Ranks without data learn how, and do it too."""
    for batch in own:
        engine.backward(engine(*batch))
        norm = engine.clip_grad_norm_(CASE.clip, error_if_nonfinite=True)
        result = engine.step()
        assert norm == result.grad_norm
        yield result


def by_torch_s_own_backward(engine: Engine, case: Case, own: Sequence[Any]) -> Iterator[Any]:
    """The last of a step is as the caller says."""
    for number, batch in enumerate(own):
        with engine.accumulate(last=number % case.accumulation == case.accumulation - 1):
            loss = engine(*batch) / case.accumulation
            engine.scale(loss).backward()
        result = engine.step()
        if number % case.accumulation == case.accumulation - 1:
            yield result


Way = Callable[[Engine, Case, Sequence[Any]], Iterator[Any]]


def train_all(cases: list[Case], counts: list[int], way: Way) -> list[Outcome]:
    """counts: of microbatches on each rank."""
    outcomes = []
    for case in cases:
        own_case = case.at(case.stage, accumulation=1) if way is by_torch_s_own_backward else case
        with start(own_case) as engine:
            outcome = Outcome()
            with engine.join():
                for result in way(engine, case, batches_of(engine.rank, counts[engine.rank])):
                    outcome.add(result)
            assert engine.global_step == max(counts) // case.accumulation
            outcome.state = engine.state_dict()
            outcomes.append(outcome)
    return outcomes


@one_thread()
def expected(steps: Sequence[Sequence[tuple[Tensor, ...]]], clip: float = CASE.clip) -> Outcome:
    """By torch alone: the mean over the microbatches that there were in each step."""
    torch.manual_seed(0)
    model, outcome = CASE.build(), Outcome()
    optimizer = adamw(model.parameters())
    for present in steps:
        optimizer.zero_grad()
        loss = torch.stack([model(*batch) for batch in present]).mean()
        loss.backward()
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        optimizer.step()
        outcome.losses.append(loss.item())
    outcome.state = dict(model.state_dict())
    return outcome


def steps_of(counts: list[int], accumulation: int = 1) -> list[list[tuple[Tensor, ...]]]:
    data = [batches_of(rank, count) for rank, count in enumerate(counts)]
    firsts = range(0, max(counts), accumulation)
    return [[batch for own in data for batch in own[first : first + accumulation]] for first in firsts]


def check(found: list[list[Outcome]], counts: list[int], accumulation: int, clip: float = CASE.clip) -> None:
    """Of each rank: the values of the steps in which it had data."""
    whole = expected(steps_of(counts, accumulation), clip)
    for rank, outcomes in enumerate(found):
        num_steps = counts[rank] // accumulation
        own = Outcome(whole.losses[:num_steps], whole.norms[:num_steps], state=whole.state if rank == 0 else {})
        for outcome in outcomes:
            outcome.lrs.clear()
            assert_close(outcome, own, 1e-8, 1e-9)


@pytest.mark.parametrize(
    ("counts", "accumulation", "way", "stages"),
    [
        ([3, 1], 1, by_train_step, (0, 3)),
        ([3, 4], 2, by_hand, (1, 2)),
        ([1, 3, 2], 1, by_hand, (0, 3)),
        ([2, 0, 4], 2, by_train_step, (1, 2)),
        ([3, 1], 1, clipping_by_hand, (3,)),
    ],
)
def test_the_mean_is_over_what_there_was(
    ranks: RankPool, counts: list[int], accumulation: int, way: Way, stages: tuple[int, ...]
) -> None:
    """Stages take turns in their transports: of two ranks all of them have both."""
    turn, clip = len(counts) + accumulation, 0.0 if way is clipping_by_hand else CASE.clip
    cases = [
        CASE.at(stage, accumulation=accumulation, clip=clip, config={"communication": {"transport": transport}})
        for stage in stages
        for transport in [("shared_memory", "sockets")[(stage + turn) % 2]]
    ]
    check(ranks(len(counts), train_all, cases, counts, way), counts, accumulation)


def test_torch_s_own_backward_and_steps_by_hand(ranks: RankPool) -> None:
    cases = []
    for stage, transport, overlap in pairs([0, 3], ["shared_memory", "sockets"], ["none", "speculative"]):
        zero = {"offload_optimizer": {"device": "cpu", "overlap": overlap}}
        config = {"communication": {"transport": transport}, "zero_optimization": zero}
        cases.append(CASE.at(stage, config=config, accumulation=2))
    wanted = expected(steps_of([4, 1], 2)).state
    for outcome in ranks(2, train_all, cases, [4, 1], by_torch_s_own_backward)[0]:
        torch.testing.assert_close(outcome.state, wanted, rtol=1e-8, atol=1e-9)


def test_it_goes_with_whatever_else_the_config_says(ranks: RankPool) -> None:
    on_cpu = {"device": "cpu"}
    cases = [
        CASE.at(3, config={"zero_optimization": {"offload_optimizer": on_cpu, "offload_param": on_cpu}}),
        CASE.at(1, config={"zero_optimization": {"offload_optimizer": {**on_cpu, "overlap": "speculative"}}}),
        CASE.at(0, config={"communication": {"transport": "native"}}),
        CASE.at(3, config={"prescale_gradients": True, **SOCKETS}),
    ]
    check(ranks(2, train_all, cases, [1, 2], by_hand), [1, 2], 1)
    in_backward = CASE.at(2, clip=0.0, config={"zero_optimization": {"update_in_backward": True}})
    check(ranks(2, train_all, [in_backward], [1, 2], by_hand), [1, 2], 1, clip=0.0)


def test_one_rank_needs_nobody() -> None:
    check([train_all([CASE.at(3)], [3], by_hand)], [3], 1)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_ranks_evaluate_agree_save_and_stop_in_it(stage: int, tmp_path: Path) -> None:
    """While rank 1 has run out. The job stops after two steps, as rank 0 says."""
    engine = start(CASE.at(stage, config={"checkpoint": {"folder": str(tmp_path), "every_steps": 1}, **SOCKETS}))
    with engine.join():
        for number, batch in enumerate(batches_of(engine.rank, 3 - 2 * engine.rank)):
            engine.train_step(batch)
            with torch.no_grad():
                alone = engine(*batch)
            mean = engine.eval_step(batch).item()
            losses = engine._mesh.world.gather_objects(alone.item()) if number == 0 else [alone.item()]
            assert mean == pytest.approx(sum(losses) / len(losses), rel=1e-12)  # in the second step rank 1 has no data
            assert engine.agree(engine.rank == 0) and engine.agree(True, how="all")
            if engine.agree(number == 1):
                break
    assert engine.global_step == 2 and engine.load_checkpoint(tmp_path) == {}
    after = engine._mesh.world.gather_objects(engine.eval_step(batch).item())
    assert after[0] == after[1]


def leave_in_the_middle_of_a_step() -> list[float]:
    """Three microbatches of two a step; the fourth comes after the context."""
    with start(CASE.at(2, accumulation=2)) as engine:
        data = batches_of(engine.rank, 4)
        with engine.join():
            for batch in data[: 3 - engine.rank]:
                engine.backward(engine(*batch))
                engine.step()
        engine.backward(engine(*data[3]))
        return [engine.step().loss.item(), engine.global_step]


def test_a_step_that_all_leave_unfinished_waits_for_its_rest(ranks: RankPool) -> None:
    first, second = batches_of(0, 4), batches_of(1, 4)
    losses = expected([[*first[:2], *second[:2]], [*first[2:], second[3]]]).losses
    assert ranks(2, leave_in_the_middle_of_a_step) == [[pytest.approx(losses[1], rel=1e-10), 2]] * 2


def join(engine: Engine) -> None:
    with engine.join():
        pass


def read_beside_the_model(engine: Engine) -> None:
    engine(*batches_of(0, 1)[0])
    engine.module.get_parameter("embedding.weight").sum()


def differ(engine: Engine) -> None:
    engine.agree(True) if engine.rank == 0 else engine.train_step(batches_of(1, 1)[0])


OUTSIDE = "expected a call outside of `with engine.join():`"
REFUSED: dict[str, tuple[Callable[[Engine, Engine], object], str]] = {
    "save": (
        lambda engine, other: engine.save_checkpoint("nowhere"),
        f"saving a checkpoint: {OUTSIDE}, found it inside: ranks that ",
    ),
    "gathered": (
        lambda engine, other: engine.gathered().__enter__(),
        f"reading or writing full weights: {OUTSIDE}, found it inside",
    ),
    "read": (
        lambda engine, other: read_beside_the_model(engine),
        f"torch.autograd.grad, or a weight read beside the model, gathered from other ranks: {OUTSIDE}, found it insi",
    ),
    "gradient": (
        lambda engine, other: engine.gradient("head.weight"),
        f"engine.gradient(), set_gradient() or clip_grad_value_(): {OUTSIDE}",
    ),
    "other": (
        lambda engine, other: other.train_step(batches_of(0, 1)[0]),
        f"a forward of another engine: {OUTSIDE}, found it inside: r",
    ),
    "other join": (
        lambda engine, other: join(other),
        "engine.join(): expected a single join at a time, found it inside of the join of another engine",
    ),
    "again": (
        lambda engine, other: join(engine),
        "engine.join(): expected a single join at a time, found it inside of another; remove either",
    ),
    "differ": (
        lambda engine, other: differ(engine),
        "engine.join(): expected the same calls of the engine on all ranks that have data, found a forward on 1 and "
        "engine.agree() on 1",
    ),
}


def make_other_calls() -> dict[str, str]:
    """The text of each refusal. Training goes on after it, where ranks have made the same calls."""
    config = {"communication": {"transport": "sockets", "timeout_seconds": 5}}
    case, found = CASE.at(3, build=models.tiny_gpt, config=config), dict[str, str]()
    with patch.object(plan, "_MIN_END_NUMEL", 1):
        engine, other = start(case), start(case)
    for what, (call, _) in REFUSED.items():
        with pytest.raises(RuntimeError) as error, engine.join():
            call(engine, other)
        if what != "differ":  # the last
            engine.train_step(batches_of(engine.rank, 1)[0])
        found[what] = str(error.value)
    return found


def test_what_ranks_without_data_cannot_join_is_refused(ranks: RankPool) -> None:
    for found in ranks(2, make_other_calls):
        for what, (_, text) in REFUSED.items():
            assert found[what].startswith(text), what


@on_ranks(2)
def test_a_refused_backward_of_another_engine_completes_no_step() -> None:
    case = CASE.at(0, accumulation=2, config=SOCKETS)
    with start(case) as engine, start(case) as other:
        first, last = (other(*batch) for batch in batches_of(other.rank, 2))
        other.backward(first)
        with engine.join(), pytest.raises(StateError, match="the last backward of a step of another engine: expected"):
            other.backward(last)
        assert "found none" in refusal(other.step, kind=StateError)


@on_ranks(2)
def test_ranks_that_take_the_same_batches_are_refused() -> None:
    assert refusal(join, start(CASE.at(0, build=Plain, config={"parallel": {"sequence": 2}}))).startswith(
        "engine.join(): expected a config without parallel.pipeline, tensor and sequence, found it: these ranks take "
    )
