"""The compute order of each schedule is that of torch's own class, rank by rank, or is better where it differs."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action, Schedule
from lowtide.pipe.schedules.simulator import Simulation, simulate


def torch_order(class_name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """What torch's schedule class lets each rank compute, as text."""
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * chunks, group_size=ranks, group_rank=0, is_last=False, submod=torch.nn.Identity()
        )
        for _ in range(chunks)
    ]
    schedule_class = getattr(torch_schedules, class_name)
    single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    order = schedule_class(stages[0] if single else stages, microbatches).pipeline_order
    return [
        [
            str(action)
            for action in flat(order[rank])
            if action.computation_type.value in {op.value for op in COMPUTE_OPS}
        ]
        for rank in range(ranks)
    ]


def flat(actions: Iterable[Any]) -> Iterable[Any]:
    """torch's actions without pauses; a forward and a backward that it does at once follow each other."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


def own_order(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule.actions]


def torch_simulation(class_name: str, mine: Schedule, chunks: int) -> Simulation:
    order = torch_order(class_name, mine.num_ranks, mine.num_microbatches, chunks)
    return simulate(mine.replace_actions([Action.parse(text) for text in row] for row in order))


def test_gpipe() -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (1, p, p + 1, 4 * p + 3):
            assert own_order(make_schedule("gpipe", p, m)) == torch_order("ScheduleGPipe", p, m, 1)


def test_1f1b() -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (p, p + 1, 2 * p, 4 * p + 3):
            mine = own_order(make_schedule("1f1b", p, m))
            theirs = torch_order("Schedule1F1B", p, m, 1)
            assert mine[:-1] == theirs[:-1]
            # torch's listing (not what it runs) counts the forwards of its last rank from 1.
            assert mine[-1][1::2] == theirs[-1][1::2]
            assert mine[-1][::2] == [f"{p - 1}F{microbatch}" for microbatch in range(m)]


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_wherever_torch_takes_the_number_of_microbatches(chunks: int) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (2, p, 2 * p, 2 * p + 2, 5 * p):
            if m % max(1, m // p) == 0:
                mine = make_schedule("interleaved", p, m, chunks)
                assert own_order(mine) == torch_order("ScheduleInterleaved1F1B", p, m, chunks)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_zb_h1_in_full_rounds(chunks: int) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (p, 2 * p, 5 * p):
            mine = make_schedule("zb-h1", p, m, chunks)
            assert own_order(mine) == torch_order("ScheduleInterleavedZeroBubble", p, m, chunks)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(4, 6), (4, 10), (8, 12), (8, 22)])
def test_zb_h1_differs_in_a_last_round_that_is_short_takes_as_long_and_less_memory(p: int, m: int, chunks: int) -> None:
    mine = make_schedule("zb-h1", p, m, chunks)
    theirs = torch_simulation("ScheduleInterleavedZeroBubble", mine, chunks)
    assert own_order(mine) != torch_order("ScheduleInterleavedZeroBubble", p, m, chunks)
    assert simulate(mine).makespan <= theirs.makespan
    assert simulate(mine).peaks[0].activation_bytes < theirs.peaks[0].activation_bytes


def test_zb_v() -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, p, 2 * p - 1, 2 * p, 3 * p + 1):
            assert own_order(make_schedule("zb-v", p, m)) == torch_order("ScheduleZBVZeroBubble", p, m, 2)


def test_dualpipe_v() -> None:
    for p in (1, 2, 3, 4, 5, 8):
        for m in (2 * p, 2 * p + 1, 5 * p):
            assert own_order(make_schedule("dualpipe-v", p, m)) == torch_order("ScheduleDualPipeV", p, m, 2)


@pytest.mark.parametrize(
    ("name", "class_name", "m", "chunks"),
    [("1f1b", "Schedule1F1B", 3, 1), ("interleaved", "ScheduleInterleaved1F1B", 9, 2)],
)
def test_numbers_of_microbatches_that_torch_refuses_are_taken(name: str, class_name: str, m: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="microbatches"):
        torch_order(class_name, 4, m, chunks)
    simulate(make_schedule(name, 4, m, chunks))
