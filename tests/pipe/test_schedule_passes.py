"""Passes add what they say and leave the rest: whole backwards, reduces and steps."""

from itertools import pairwise

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.passes import add_reduces, complete, merge_backward
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate


def count(schedule: Schedule, op: Op) -> int:
    return sum(action.op is op for actions in schedule.actions for action in actions)


def test_halves_that_follow_each_other_become_a_whole_backward() -> None:
    row = "0F0 0F1 0F2 0I0 0W0 0I1 0I2 0W1 0W2"
    schedule = Schedule("own", 1, 1, 3, (0,), (tuple(map(Action.parse, row.split())),))
    assert " ".join(map(str, merge_backward(schedule).actions[0])) == "0F0 0F1 0F2 0B0 0I1 0I2 0W1 0W2"


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.splits_backward])
def test_halves_are_merged_where_it_delays_nobody(name: str) -> None:
    for p, m in ((1, 2), (2, 4), (4, 8), (4, 16), (8, 16)):
        schedule = make_schedule(name, p, m)
        unequal = {"forward": 2.0, "input_backward": 3.0, "weight_backward": 1.0}
        times: tuple[dict[str, float], ...] = ({}, {"send": 0.3}, unequal)
        for costs in (Costs.uniform(schedule.num_stages, **some) for some in times):
            merged = merge_backward(schedule, costs)
            assert count(merged, Op.B) > count(schedule, Op.B)
            assert simulate(merged, costs).makespan == pytest.approx(simulate(schedule, costs).makespan)


def test_what_would_delay_somebody_is_not_merged_where_costs_are_known() -> None:
    schedule = make_schedule("zb-v", 4, 8)
    assert count(merge_backward(schedule), Op.B) > count(merge_backward(schedule, Costs.uniform(8)), Op.B)
    assert simulate(merge_backward(schedule)).makespan > simulate(schedule).makespan
    halves = make_schedule("zb-h1", 4, 8)
    assert merge_backward(halves, Costs.uniform(4, backward=3.0)) == halves


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_reduced_after_the_last_backward_of_their_stage(name: str) -> None:
    schedule = add_reduces(make_schedule(name, 3, 6))
    assert count(schedule, Op.REDUCE) == schedule.num_stages and add_reduces(schedule) == schedule
    for row in schedule.actions:
        for index, action in enumerate(row):
            if action.op is Op.REDUCE:
                assert row[index - 1].op in (Op.B, Op.W) and row[index - 1].stage == action.stage
                assert all(later.stage != action.stage for later in row[index + 1 :])


def test_no_send_waits_for_a_release_or_a_reduce() -> None:
    lists = [" ".join(map(str, row)) for row in complete(make_schedule("1f1b", 2, 1), gathers=True).actions]
    assert lists == [
        "0GATHER 0F0 0SEND_F0 0RECV_B0 0B0 0RELEASE 0REDUCE",
        "1RECV_F0 1GATHER 1F0 1B0 1SEND_B0 1RELEASE 1REDUCE",
    ]
    for name in KINDS:
        for row in complete(make_schedule(name, 3, 6), gathers=True, budget=1).actions:
            for before, after in pairwise(row):
                assert not (before.op in (Op.RELEASE, Op.REDUCE) and after.op in (Op.SEND_F, Op.SEND_B))


@pytest.mark.parametrize("name", KINDS)
def test_a_complete_schedule_has_all_that_a_rank_does_and_takes_no_longer(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    whole, plain = complete(schedule, gathers=True), complete(schedule)
    assert all(whole.has_any(op) for op in (Op.SEND_F, Op.RECV_B, Op.GATHER, Op.RELEASE, Op.REDUCE))
    assert simulate(whole).makespan == simulate(schedule).makespan
    assert not plain.has_any(Op.GATHER, Op.STEP) and plain.has_any(Op.REDUCE)
    assert complete(plain) == plain, "messages of a user's own schedule stay where they are"
