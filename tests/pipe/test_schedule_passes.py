"""Passes add what they say and leave the rest: whole backwards, messages that arrive, gathers, reduces and steps."""

import random
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from lowtide.comm import Pending
from lowtide.pipe.messages import Messages, deliveries
from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.generators import layered, layered_evaluation
from lowtide.pipe.schedules.passes import add_gathers, add_messages, add_reduces, complete, merge_backward
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import forward_only, lines_of, schedule_of


def count(schedule: Schedule, op: Op, rank: int | None = None) -> int:
    """On a rank, or on all."""
    lists = schedule.actions if rank is None else [schedule.actions[rank]]
    return sum(action.op is op for actions in lists for action in actions)


def test_halves_that_follow_each_other_become_a_whole_backward() -> None:
    schedule = schedule_of("0F0 0F1 0F2 0I0 0W0 0I1 0I2 0W1 0W2", microbatches=3)
    assert lines_of(merge_backward(schedule)) == ["0F0 0F1 0F2 0B0 0I1 0I2 0W1 0W2"]


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
def test_gradients_come_in_the_order_of_microbatches_and_are_reduced_after_the_last(name: str) -> None:
    schedule = add_reduces(make_schedule(name, 3, 6))
    assert count(schedule, Op.REDUCE) == schedule.num_stages and add_reduces(schedule) == schedule
    for stage, row in ((stage, schedule.actions[rank]) for stage, rank in enumerate(schedule.rank_of_stage)):
        made = [action.microbatch for action in row if action.op in (Op.B, Op.W) and action.stage == stage]
        assert made == list(range(6)), "in each order of sums the last bits are others"
    for row in schedule.actions:
        for index, action in enumerate(row):
            if action.op is Op.REDUCE:
                assert row[index - 1].op in (Op.B, Op.W) and row[index - 1].stage == action.stage
                assert all(later.stage != action.stage for later in row[index + 1 :])


def test_no_send_waits_for_a_release_or_a_reduce() -> None:
    assert lines_of(complete(make_schedule("1f1b", 2, 1), gathers=True)) == [
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


def fewest_gathers(stages: tuple[int, ...], budget: int) -> int:
    """By trying every choice."""

    @cache
    def rest(position: int, held: frozenset[int]) -> int:
        if position == len(stages):
            return 0
        stage = stages[position]
        if stage in held:
            return rest(position + 1, held)
        if len(held) < budget:
            return 1 + rest(position + 1, held | {stage})
        return 1 + min(rest(position + 1, held - {victim} | {stage}) for victim in held)

    return rest(0, frozenset())


@pytest.mark.parametrize("name", KINDS)
def test_without_a_budget_each_stage_is_gathered_once_from_its_first_use_to_its_last(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    for rank, row in enumerate(add_gathers(schedule).actions):
        assert tuple(action for action in row if action.op in COMPUTE_OPS) == schedule.actions[rank]
        for stage in schedule.stages_of_rank(rank):
            own = [action for action in row if action.stage == stage]
            assert (own[0], own[-1]) == (Action(Op.GATHER, stage), Action(Op.RELEASE, stage))
            assert sum(action.op is Op.GATHER for action in own) == 1


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("interleaved", 4), ("zb-h1", 3), ("zb-v", 2)])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_budget_holds_with_the_fewest_gathers(name: str, chunks: int, budget: int) -> None:
    for p, m in ((1, 4), (2, 4), (3, 7)):
        schedule = make_schedule(name, p, m, chunks)
        gathered = add_gathers(schedule, budget)
        costs = Costs.uniform(schedule.num_stages, parameter_bytes=1.0)
        for rank, peaks in enumerate(simulate(gathered, costs).peaks):
            assert peaks.parameter_bytes <= budget
            uses = tuple(action.stage for action in schedule.actions[rank])
            assert count(gathered, Op.GATHER, rank) == fewest_gathers(uses, budget)


def test_a_stage_is_gathered_for_a_run_of_uses_and_one_action_ahead_where_there_is_room() -> None:
    two = schedule_of("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", ranks=(0, 0), microbatches=2)
    assert lines_of(add_gathers(two, 1)) == [
        "0GATHER 0F0 0F1 0RELEASE 1GATHER 1F0 1B0 1F1 1B1 1RELEASE 0GATHER 0B0 0B1 0RELEASE"
    ]
    assert lines_of(add_gathers(schedule_of("0F0 1F0 2F0 2B0 1B0 0B0", ranks=(0, 0, 0)), 2)) == [
        "0GATHER 1GATHER 0F0 0RELEASE 2GATHER 1F0 2F0 2B0 2RELEASE 0GATHER 1B0 1RELEASE 0B0 0RELEASE"
    ]


def test_sizes_are_weighed_against_the_budget() -> None:
    schedule, sizes = schedule_of("0F0 1F0 2F0 2B0 1B0 0B0", ranks=(0, 0, 0)), (10.0, 1.0, 5.0)
    costs = Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (0.0,) * 3, (0.0,) * 3, sizes)
    gathered = add_gathers(schedule, 11.0, sizes)
    assert count(gathered, Op.GATHER) == 4  # stage 1 stays beside each of the others
    for one in (gathered, complete(schedule, costs, gathers=True, budget=11.0)):
        assert simulate(one, costs).peaks[0].parameter_bytes == 11


def test_what_cannot_be_gathered_is_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    assert refusal(add_gathers, schedule, 50.0, [40.0, 60.0]) == (
        "schedule 1f1b: expected parameters of stage 1 within the budget for gathered parameters, 50, found 60; "
        "raise the budget, or split the model over more stages"
    )
    assert "schedule 1f1b: expected no gathers and releases, found some" in refusal(add_gathers, add_gathers(schedule))


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            layered(3, 2, [True] * 3),
            "0GATHER 1GATHER 0F0 0F1 0RELEASE 2GATHER 1F0 1F1 1RELEASE 2F0 2F1 "
            "1GATHER 2B0 2B1 2REDUCE 2RELEASE 0GATHER 1B0 1B1 1REDUCE 1RELEASE 0B0 0B1 0REDUCE 0RELEASE",
        ),
        (
            layered(2, 2, [False] * 2),  # without room ahead
            "0GATHER 0F0 0F1 0RELEASE 1GATHER 1F0 1F1 1B0 1B1 1REDUCE 1RELEASE 0GATHER 0B0 0B1 0REDUCE 0RELEASE",
        ),
        (layered(2, 2), "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE 0B0 0B1 0REDUCE"),
        (layered_evaluation(2), "0F0 1F0"),
        (layered_evaluation(2, [True] * 2), "0GATHER 1GATHER 0F0 0RELEASE 1F0 1RELEASE"),
    ],
)
def test_layer_by_layer_all_microbatches_of_a_stage_come_before_the_next_stage(schedule: Schedule, text: str) -> None:
    assert lines_of(schedule) == [text]


GRID = [(1, 2), (2, 4), (3, 7), (4, 8)]
RECEIVES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}  # by what uses it


def random_costs(num_stages: int, seed: int) -> Costs:
    source = random.Random(seed)
    f, b, i, w = (tuple(source.choice([0.0, 0.3, 1.0, 5.0]) for _ in range(num_stages)) for _ in range(4))
    ones = (1.0,) * num_stages
    return Costs(f, b, i, w, ones, ones, ones, send=source.choice([0.0, 0.2, 2.0]))


@pytest.mark.parametrize("name", KINDS)
def test_no_order_deadlocks_even_if_every_send_and_receive_blocks(name: str) -> None:
    """So messages need no tags: the simulator refuses receives in another order than the sends."""
    for p, m in GRID:
        for schedule in (make_schedule(name, p, m), forward_only(make_schedule(name, p, m))):
            simulate(add_messages(schedule), blocking=True)
            simulate(add_messages(merge_backward(schedule)), blocking=True)
            for seed in range(2):
                costs = random_costs(schedule.num_stages, seed)
                # In an order made for one machine, run on another.
                simulate(add_messages(schedule, costs), random_costs(schedule.num_stages, seed + 1), blocking=True)


@pytest.mark.parametrize("name", KINDS)
def test_messages_do_not_make_a_step_longer(name: str) -> None:
    for p, m in GRID:
        schedule = make_schedule(name, p, m)
        for seed in range(2):
            costs = random_costs(schedule.num_stages, seed)
            assert simulate(add_messages(schedule, costs), costs).makespan == simulate(schedule, costs).makespan


def test_the_messages_of_1f1b_on_two_ranks() -> None:
    schedule = add_messages(make_schedule("1f1b", 2, 3))
    assert lines_of(schedule) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
    ]
    assert "schedule 1f1b: expected no sends and receives, found some" in refusal(add_messages, schedule)


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_has_at_most_four_messages_that_it_has_not_used(name: str) -> None:
    for p, m in ((2, 8), (4, 16), (8, 24)):
        for row in add_messages(make_schedule(name, p, m)).actions:
            unused: set[Action] = set()
            for action in row:
                if action.op in RECV_OPS:
                    unused.add(action)
                elif action.op in RECEIVES:
                    unused.discard(Action(RECEIVES[action.op], action.stage, action.microbatch))
                assert len(unused) <= 4


# -- what has arrived -------------------------------------------------------------------------------------------------


def other_end(schedule: Schedule, message: Action) -> int:
    """Where the other rank's list makes or uses a message."""
    ops = (Op.F,) if message.op in (Op.SEND_F, Op.RECV_F) else (Op.B, Op.I)
    wanted = [Action(op, message.peer_stage, message.microbatch) for op in ops]
    places = [place for place, action in enumerate(schedule.actions[schedule.peer_rank(message)]) if action in wanted]
    (found,) = places
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_send_is_known_to_have_arrived_when_what_was_made_after_it_is_there(name: str) -> None:
    for ranks, microbatches in product((2, 4), (8, 9)):
        schedule = complete(make_schedule(name, ranks, microbatches))
        for place, own in enumerate(schedule.actions):
            told_by = {send: receive for receive, sends in deliveries(schedule, place).items() for send in sends}
            for send in (action for action in own if action.op in SEND_OPS):
                peer, used = schedule.peer_rank(send), other_end(schedule, send)
                of_peer = [one for one in own if one.op in RECV_OPS and schedule.peer_rank(one) == peer]
                tellers = {made: one for one in of_peer if (made := other_end(schedule, one)) > used}
                assert told_by.get(send) == (tellers[min(tellers)] if tellers else None)


class Wire:
    """In the place of `Peers`: nobody can tell how far a message is, and what is received is there."""

    def __init__(self) -> None:
        self.waited: list[str] = []  # what was sent and then waited for

    def send(self, values: Any, place: int, tag: int, what: str) -> Pending:
        return Pending(lambda: self.waited.append(what.split()[2]))

    def receive(self, *args: Any) -> Pending:
        return Pending()


def first_rank(schedule: Schedule) -> tuple[Messages, Wire]:
    """What it has under way, and the wire."""
    wire: Any = Wire()
    messages = Messages(schedule, 0, wire, torch.device("cpu"))
    messages.begin([None] * schedule.num_microbatches)
    return messages, wire


def test_a_rank_lets_go_of_what_has_arrived_and_of_nothing_else() -> None:
    schedule = complete(make_schedule("1f1b", 2, 4))
    messages, wire = first_rank(schedule)
    found = []
    for action in schedule.actions[0]:
        messages.wait_for_needs_of(action)
        if action.op is Op.SEND_F:
            messages.send(action, [torch.ones(2), torch.ones(3)])
        elif action.op is Op.RECV_B:
            messages._receive(action, ())
        elif action.op is Op.B:
            found.append(sorted({*wire.waited}))
            assert len(wire.waited) == 2 * len(found[-1])
    assert found == [[f"0SEND_F{microbatch}" for microbatch in range(last + 1)] for last in range(4)]


def test_no_more_messages_are_held_than_may_be_and_the_oldest_goes_first() -> None:
    messages, wire = first_rank(complete(make_schedule("gpipe", 2, 6)))
    for microbatch in range(6):
        messages.send(Action(Op.SEND_F, 0, microbatch), [torch.ones(2)])
        messages.wait_sent(4)
        assert wire.waited == [f"0SEND_F{number}" for number in range(microbatch - 3)]
    messages.wait_sent(0)
    assert len(wire.waited) == 6
