"""The compute order of each schedule is that of torch's own class, rank by rank, or is better where it differs."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action
from lowtide.pipe.schedules.simulator import simulate

KINDS = {op.value for op in COMPUTE_OPS}


def torch_order(class_name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """What torch's schedule class lets each rank compute, as text."""
    numbers = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0, "is_last": False}
    stages: list[Any] = [SimpleNamespace(**numbers, submod=torch.nn.Identity()) for _ in range(chunks)]
    schedule_class = getattr(torch_schedules, f"Schedule{class_name}")
    single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    order = schedule_class(stages[0] if single else stages, microbatches).pipeline_order
    return [[str(one) for one in flat(order[rank]) if one.computation_type.value in KINDS] for rank in range(ranks)]


def flat(actions: Iterable[Any]) -> Iterable[Any]:
    """torch's actions without pauses; a forward and a backward that it does at once follow each other."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


def own_order(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    return [[str(action) for action in row] for row in make_schedule(name, ranks, microbatches, chunks).actions]


def that_torch_takes(p: int) -> Iterable[int]:
    return (m for m in (2, p, 2 * p, 2 * p + 2, 5 * p) if m % max(1, m // p) == 0)


Row = tuple[str, str, tuple[int, ...], Callable[[int], Iterable[int]]]
ROWS: list[Row] = [  # schedule, torch's class, chunks, and numbers of microbatches for p ranks
    ("gpipe", "GPipe", (1,), lambda p: (1, p, p + 1, 4 * p + 3)),
    ("1f1b", "1F1B", (1,), lambda p: (p, p + 1, 2 * p, 4 * p + 3)),
    ("interleaved", "Interleaved1F1B", (2, 3, 4), that_torch_takes),
    ("zb-h1", "InterleavedZeroBubble", (1, 2, 3), lambda p: (p, 2 * p, 5 * p)),
    ("zb-v", "ZBVZeroBubble", (2,), lambda p: (1, 2, p, 2 * p - 1, 2 * p, 3 * p + 1)),
    ("dualpipe-v", "DualPipeV", (2,), lambda p: (2 * p, 2 * p + 1, 5 * p)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_order_is_that_of_torch(row: Row) -> None:
    name, class_name, chunks, microbatches = row
    for p in (1, 2, 3, 4, 5, 8):
        for m in microbatches(p):
            for v in chunks:
                mine, theirs = own_order(name, p, m, v), torch_order(class_name, p, m, v)
                if name == "1f1b":  # torch's listing (not what it runs) counts the forwards of its last rank from 1
                    assert mine[-1][::2] == [f"{p - 1}F{microbatch}" for microbatch in range(m)]
                    theirs[-1][::2] = mine[-1][::2]
                assert mine == theirs, (p, m, v)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(4, 6), (4, 10), (8, 12), (8, 22)])
def test_zb_h1_differs_in_a_last_round_that_is_short_takes_as_long_and_less_memory(p: int, m: int, chunks: int) -> None:
    schedule, order = make_schedule("zb-h1", p, m, chunks), torch_order("InterleavedZeroBubble", p, m, chunks)
    assert own_order("zb-h1", p, m, chunks) != order
    mine, theirs = simulate(schedule), simulate(schedule.replace_actions(map(Action.parse, row) for row in order))
    assert mine.makespan <= theirs.makespan
    assert mine.peaks[0].activation_bytes < theirs.peaks[0].activation_bytes


@pytest.mark.parametrize(
    ("name", "class_name", "m", "chunks"), [("1f1b", "1F1B", 3, 1), ("interleaved", "Interleaved1F1B", 9, 2)]
)
def test_numbers_of_microbatches_that_torch_refuses_are_taken(name: str, class_name: str, m: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="microbatches"):
        torch_order(class_name, 4, m, chunks)
    simulate(make_schedule(name, 4, m, chunks))
