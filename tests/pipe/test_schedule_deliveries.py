"""A rank that receives knows which of its messages have arrived: never too many, and all that the order tells."""

from itertools import product
from typing import Any

import pytest
import torch

from lowtide.comm import Pending
from lowtide.pipe.messages import Messages, deliveries
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import RECV_OPS, SEND_OPS, Action, Op, Schedule


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
