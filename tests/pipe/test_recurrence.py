"""A schedule in numbers costs what the simulator says, action by action."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.fast_simulation import FastSimulation
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Action, Op, Schedule, ScheduleError
from lowtide.pipe.schedules.simulator import simulate


def drawn_costs(draw: random.Random, num_stages: int) -> Costs:
    """Stages that differ, and activations of which a part is kept."""
    f, b, i, w = (tuple(draw.uniform(0.5, 2.0) for _ in range(num_stages)) for _ in range(4))
    whole = tuple(float(draw.randint(10, 20)) for _ in range(num_stages))
    kept = tuple(float(draw.randint(0, 10)) for _ in range(num_stages))
    send = draw.choice([0.0, 0.3])
    collect, half = draw.choice([(), w]), draw.choice([(), i])
    return Costs(f, b, i, w, whole, kept, (0.0,) * num_stages, send, collect, half)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_recurrence_costs_what_is_simulated(name: str, ranks: int) -> None:
    """To the bit, but for the sum of a rank's own times."""
    draw, kind = random.Random(ranks), KINDS[name]
    for microbatches in (1, ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks + 2):
        if microbatches < kind.microbatches_per_rank * ranks:
            continue
        for chunks in {kind.min_chunks, kind.max_chunks or 3}:
            schedule = make_schedule(name, ranks, microbatches, chunks)
            recurrence = FastSimulation(schedule)
            for costs in (Costs.uniform(schedule.num_stages, send=0.25), drawn_costs(draw, schedule.num_stages)):
                found, simulated = recurrence.outcome(costs), simulate(schedule, costs)
                assert found.makespan == simulated.makespan
                slots = [slot for of_rank in simulated.timeline for slot in of_rank]
                assert recurrence.starts(costs) == pytest.approx([slot.start for slot in slots], abs=1e-9)
                assert found.busy == pytest.approx(simulated.busy)
                assert found.activation_bytes == tuple(peaks.activation_bytes for peaks in simulated.peaks)


def moments_of(row: Sequence[Action], own: Sequence[int], num_microbatches: int) -> set[tuple[int, ...]]:
    """Rows as `Computing` has them, by counting what was done before each action of a rank."""
    done, found = list[Action](), set()
    for action in row:
        forward, input_ends, ends = (
            [sum(one.op in ops and one.stage == stage for one in done) for stage in own]
            for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W))
        )
        is_left, is_ended = (
            [action.op in ops and action.stage == stage for stage in own] for ops in ((Op.B, Op.I), (Op.B, Op.I, Op.W))
        )
        held = [all_ - left - now for all_, left, now in zip(forward, input_ends, is_left, strict=True)]
        kept = [all_ - left - now for all_, left, now in zip(forward, ends, is_ended, strict=True)]
        flags = [int(number >= least) for least in (1, num_microbatches) for number in ends]
        found.add(("FBIW".index(action.op.value), own.index(action.stage), *held, *kept, *flags))
        done.append(action)
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_moments_know_what_other_microbatches_hold_and_which_stages_have_ended(name: str) -> None:
    schedule = make_schedule(name, 2, 4, KINDS[name].max_chunks or 2)
    recurrence = FastSimulation(schedule)
    for found, own, row in zip(recurrence.computing, recurrence.stages, schedule.actions, strict=True):
        columns = np.column_stack([found.codes, found.places, found.held, found.kept, found.begun, found.ended])
        assert {tuple(one) for one in columns.tolist()} == moments_of(row, own, 4)


def test_ranks_that_wait_for_ever_are_named() -> None:
    rows = ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    lists = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError, match="deadlock, 2 of 2 ranks wait forever"):
        FastSimulation(Schedule("turned", 2, 2, 2, (0, 1), lists))
