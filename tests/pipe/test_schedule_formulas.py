"""Schedules have the order of torch's own classes, and the idle time and memory of their closed forms."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action
from lowtide.pipe.schedules.simulator import Simulation, simulate

Times = tuple[float, float, float]  # F, I, W of a rank's share of the model
RANKS = (1, 2, 3, 5)
EQUAL: Times = (1.0, 1.0, 1.0)
UNEQUAL: tuple[Times, ...] = (EQUAL, (1.0, 1.2, 0.8), (3.0, 5.0, 2.0))


def run(name: str, ranks: int, microbatches: int, chunks: int, times: Times = EQUAL) -> Simulation:
    """A step in which a rank's stages divide its costs evenly. An activation of its whole share is 1."""
    f, i, w = (time / chunks for time in times)
    costs = Costs.uniform(ranks * chunks, forward=f, input_backward=i, weight_backward=w, activation_bytes=1 / chunks)
    return simulate(make_schedule(name, ranks, microbatches, chunks), costs)


def whole(f: float, i: float, w: float) -> float:
    return f + i + w


def without_weights(f: float, i: float, w: float) -> float:
    return f + i - w


@dataclass
class Row:
    """name; for p ranks the numbers of microbatches; the idle time for each rank but one and each chunk; the
    activations that rank r holds at most of m microbatches, with all of them kept from I to W."""

    name: str
    chunks: tuple[int, ...]
    times: tuple[Times, ...]
    microbatches: Callable[[int], Iterable[int]]
    idle: Callable[[float, float, float], float]
    held: Callable[[int, int, int, int], float]  # of p, chunks, m, r


ROWS = [
    Row("gpipe", (1,), UNEQUAL, lambda p: (1, 2, 3, 5, 8, 17), whole, lambda p, v, m, r: m),
    Row("1f1b", (1,), UNEQUAL, lambda p: (1, 2, 3, 5, 8, 17), whole, lambda p, v, m, r: min(m, p - r)),
    Row(
        *("interleaved", (2, 3), UNEQUAL, lambda p: (p, 2 * p, 5 * p), whole),
        lambda p, v, m, r: min((v - 1) * p + 2 * (p - 1 - r) + 1, v * m) / v,
    ),
    Row("zb-h1", (1,), UNEQUAL, lambda p: range(p, 3 * p + 3), without_weights, lambda p, v, m, r: p),
    Row("zb-h1", (2, 3), UNEQUAL, lambda p: (p, 2 * p, 3 * p), without_weights, lambda p, v, m, r: p),
    Row("zb-v", (2,), (EQUAL,), lambda p: (2 * p - 1, 2 * p, 3 * p + 1, 6 * p), without_weights, lambda p, v, m, r: p),
    Row("dualpipe-v", (2,), (EQUAL,), lambda p: (2 * p, 2 * p + 1, 5 * p), without_weights, lambda p, v, m, r: p + 0.5),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_idle_time_and_memory_are_those_of_the_closed_forms(row: Row) -> None:
    for p, v, times in product(RANKS, row.chunks, row.times):
        for m in row.microbatches(p):
            found, idle = run(row.name, p, m, v, times), (p - 1) * row.idle(*times) / v
            assert found.makespan - found.busy[0] == pytest.approx(idle)
            assert found.bubble == pytest.approx(idle / (idle + m * sum(times)))
            assert found.overhead == pytest.approx(idle / (m * sum(times)))
            held = [peak.activation_bytes for peak in found.peaks]
            assert held == pytest.approx([row.held(p, v, m, r) for r in range(p)])
            if row.name == "zb-v":  # what is left is the way of the first microbatch to the last rank
                assert found.waits == pytest.approx([0.0] * p)


def test_rounds_that_are_not_full_add_no_idle_time_to_zb_h1_and_few_microbatches_take_no_more_memory() -> None:
    for p, v in product(RANKS, (2, 3)):
        for m in range(p, 3 * p + 1):
            found = run("zb-h1", p, m, v)
            assert found.makespan - found.busy[0] == pytest.approx((p - 1) / v)
            if 2 * (m % p) >= p or m % p == 0:
                assert [peak.activation_bytes for peak in found.peaks] == pytest.approx([p] * p)
        for m in range(1, p):
            assert [peak.activation_bytes for peak in run("zb-h1", p, m, 1).peaks] == [m] * p
            assert max(peak.activation_bytes for peak in run("zb-v", p, m, 2).peaks) <= p


@pytest.mark.parametrize(
    ("name", "chunks"), [("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2)]
)
def test_it_is_no_slower_than_1f1b_for_any_number_of_microbatches_from_p_on(name: str, chunks: int) -> None:
    for p in (2, 3, 4):
        for m in range(p, 3 * p + 1):
            assert run(name, p, m, chunks).makespan <= run("1f1b", p, m, 1).makespan * (1 + 1e-9)


def test_what_w_does_not_need_is_freed_after_i() -> None:
    peaks = simulate(make_schedule("zb-h1", 4, 8), Costs.uniform(4, activation_bytes=10.0, kept_bytes=4.0)).peaks
    # Rank 3 has one microbatch before its I at a time, and three that wait for W.
    assert (peaks[3].activation_bytes, peaks[0].activation_bytes) == (10 + 3 * 4, 40)


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


Order = tuple[str, str, tuple[int, ...], Callable[[int], Iterable[int]]]
ORDERS: list[Order] = [  # schedule, torch's class, chunks, and numbers of microbatches for p ranks
    ("gpipe", "GPipe", (1,), lambda p: (1, p, p + 1, 4 * p + 3)),
    ("1f1b", "1F1B", (1,), lambda p: (p, p + 1, 2 * p, 4 * p + 3)),
    ("interleaved", "Interleaved1F1B", (2, 3, 4), that_torch_takes),
    ("zb-h1", "InterleavedZeroBubble", (1, 2, 3), lambda p: (p, 2 * p, 5 * p)),
    ("zb-v", "ZBVZeroBubble", (2,), lambda p: (1, 2, p, 2 * p - 1, 2 * p, 3 * p + 1)),
    ("dualpipe-v", "DualPipeV", (2,), lambda p: (2 * p, 2 * p + 1, 5 * p)),
]


@pytest.mark.parametrize("row", ORDERS, ids=lambda row: row[0])
def test_the_order_is_that_of_torch(row: Order) -> None:
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
