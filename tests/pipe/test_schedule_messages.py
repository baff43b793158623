"""Sends and receives are put where they can never deadlock and never make a step longer, and are known to arrive."""

import random
from itertools import product
from typing import Any

import pytest
import torch

from lowtide.comm import Pending
from lowtide.pipe.messages import Messages, deliveries
from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.passes import add_messages, complete, merge_backward
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import forward_only

GRID = [(1, 2), (2, 4), (3, 7), (4, 8)]
RECEIVES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}  # by what uses it
MAKERS = {Op.SEND_F: (Op.F,), Op.SEND_B: (Op.B, Op.I)}


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


@pytest.mark.parametrize("name", KINDS)
def test_every_message_has_two_ends_and_what_is_made_is_sent_at_once(name: str) -> None:
    schedule, is_v = make_schedule(name, 4, 8), KINDS[name].is_v
    lists = add_messages(schedule).actions
    assert tuple(tuple(action for action in row if action.op in COMPUTE_OPS) for row in lists) == schedule.actions
    crossings = 6 if is_v else schedule.num_stages - 1
    for op in (*SEND_OPS, *RECV_OPS):
        assert sum(action.op is op for actions in lists for action in actions) == 8 * crossings
    if is_v:  # stages 3 and 4 are both on rank 3
        assert Action(Op.SEND_F, 3, 0) not in lists[3] and Action(Op.RECV_B, 3, 0) not in lists[3]
    for row in lists:
        for index, action in enumerate(row):
            if action.op in SEND_OPS:
                before = [other for other in row[:index] if other.op in COMPUTE_OPS][-1]
                assert before.op in MAKERS[action.op]
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)


def test_the_messages_of_1f1b_on_two_ranks() -> None:
    schedule = add_messages(make_schedule("1f1b", 2, 3))
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
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
