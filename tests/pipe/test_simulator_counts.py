"""The simulator's times and bytes are those that one works out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.schedule import Action, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import forward_only


def two_ranks(costs: Costs) -> list[list[tuple[str, float, float]]]:
    """When each action of two ranks' 1F1B with two microbatches begins and ends."""
    simulation = simulate(make_schedule("1f1b", 2, 2), costs)
    return [[(str(slot.action), slot.start, slot.end) for slot in slots] for slots in simulation.timeline]


def test_each_stage_has_its_own_times() -> None:
    kept, parameters = (7.0, 3.0), (100.0, 50.0)
    costs = Costs((1.0, 4.0), (2.0, 10.0), (1.0, 5.0), (1.0, 5.0), kept, kept, parameters)
    assert two_ranks(costs) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 15, 17), ("0B1", 29, 31)],
        [("1F0", 1, 5), ("1B0", 5, 15), ("1F1", 15, 19), ("1B1", 19, 29)],
    ]
    found = simulate(make_schedule("1f1b", 2, 2), costs)
    assert (found.makespan, found.busy, found.waits) == (31, (6, 28), (25, 0))
    assert (found.bubble, found.overhead) == pytest.approx((1 - 34 / 62, 31 / 28 - 1))
    bytes_of_ranks = [(peak.activation_bytes, peak.parameter_bytes, peak.total_bytes) for peak in found.peaks]
    assert bytes_of_ranks == [(14, 100, 114), (3, 50, 53)]


def test_a_message_takes_its_time_only_between_ranks() -> None:
    assert two_ranks(Costs.uniform(2, send=0.5)) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert simulate(make_schedule("zb-v", 1, 4), Costs.uniform(2, send=100.0)).makespan == 2 * 4 * 3


def test_what_is_collected_after_all_backwards_but_the_last_comes_before_what_is_sent() -> None:
    assert two_ranks(replace(Costs.uniform(2), collect=(1.0, 0.5))) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4.5, 7.5), ("0B1", 7.5, 9.5)],
        [("1F0", 1, 2), ("1B0", 2, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]


def test_messages_in_the_lists_are_under_way_while_ranks_compute_unless_they_block() -> None:
    costs = Costs.uniform(2, send=0.5)
    schedule = complete(make_schedule("1f1b", 2, 2), costs)
    assert simulate(schedule, costs).makespan == 10
    # 0F0, its message, 0F1, its message (1RECV_F1 stands before 1F0), 1F0, 1B0, its message, 1F1, 1B1, its message, 0B1
    assert simulate(schedule, costs, blocking=True).makespan == 1 + 0.5 + 1 + 0.5 + 1 + 2 + 0.5 + 1 + 2 + 0.5 + 2


def test_a_message_is_under_way_when_both_ends_are_reached() -> None:
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    schedule = Schedule("own", 2, 2, 2, (0, 1), tuple(tuple(map(Action.parse, row.split())) for row in rows))
    timeline = simulate(schedule, Costs.uniform(2, send=3.0)).timeline
    starts = {str(slot.action): slot.start for row in timeline for slot in row}
    assert starts["1F0"] == 1 + 3  # sent at 1
    assert (starts["1RECV_F1"], starts["1F1"]) == (7, 7 + 3)  # 0SEND_F1 is reached at 2


def test_the_order_of_slots_puts_each_action_after_what_it_waits_for() -> None:
    for name in ("1f1b", "zb-v"):
        slots = {slot.action: slot for row in simulate(make_schedule(name, 3, 6)).timeline for slot in row}
        assert sorted(slot.order for slot in slots.values()) == list(range(len(slots)))
        for action, slot in slots.items():
            step = {"F": -1, "B": 1, "I": 1}.get(action.op.value)
            before = slots.get(Action(action.op, action.stage + step, action.microbatch)) if step else None
            assert before is None or (before.order < slot.order and before.end <= slot.start)


def test_a_forward_only_schedule_keeps_no_activations() -> None:
    simulation = simulate(forward_only(make_schedule("1f1b", 4, 8)))
    assert simulation.makespan == 8 + 3
    assert [(peak.activation_bytes, peak.in_flight) for peak in simulation.peaks] == [(1, 1)] * 4


def test_the_peak_of_the_sum_is_at_most_the_sum_of_the_peaks() -> None:
    # 2F0 runs with three activations and stage 2 alone gathered; stages 0 and 1 are gathered before.
    row = "0GATHER 1GATHER 0F0 1F0 0RELEASE 1RELEASE 2GATHER 2F0 2B0 2RELEASE 1GATHER 1B0 1RELEASE 0GATHER 0B0 0RELEASE"
    schedule = Schedule("own", 1, 3, 1, (0, 0, 0), (tuple(map(Action.parse, row.split())),))
    peaks = simulate(schedule, Costs.uniform(3, parameter_bytes=10.0)).peaks[0]
    assert (peaks.activation_bytes, peaks.parameter_bytes, peaks.total_bytes) == (3, 20, 22)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": (-1.0, 1.0)}, "forward of stage 0: expected 0 or more, found -1"),
        ({"kept_bytes": (2.0, 1.0)}, "kept_bytes of stage 0: expected at most activation_bytes, 1, found 2"),
        ({"send": -0.5}, "send: expected 0 or more, found -0.5"),
        ({"backward": (2.0,)}, "backward: expected a value for each of 2 stages, found 1 values"),
        ({"collect": (1.0,)}, "collect: expected a value for each of 2 stages, found 1 values"),
    ],
)
def test_costs_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    assert refusal(replace, Costs.uniform(2), **change) == message
