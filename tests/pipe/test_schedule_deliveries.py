"""A rank that receives knows which of its messages have arrived: never too many, and all that the order tells."""

from itertools import product

import pytest

from lowtide.pipe.deliveries import deliveries
from lowtide.pipe.schedules.action import RECV_OPS, SEND_OPS, Action, Op
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Schedule


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
                used = other_end(schedule, send)
                tellers = [
                    action
                    for action in own
                    if action.op in RECV_OPS
                    and schedule.peer_rank(action) == schedule.peer_rank(send)
                    and other_end(schedule, action) > used
                ]
                first = min(tellers, key=lambda action: other_end(schedule, action), default=None)
                assert told_by.get(send) == first


def test_every_forward_has_arrived_when_its_gradient_is_back() -> None:
    schedule = complete(make_schedule("1f1b", 2, 4))
    known = deliveries(schedule, 0)
    for microbatch in range(4):
        assert Action(Op.SEND_F, 0, microbatch) in known[Action(Op.RECV_B, 0, microbatch)]


def test_a_gradient_has_arrived_when_a_forward_that_comes_after_it_is_there() -> None:
    schedule = complete(make_schedule("1f1b", 2, 4))
    # Rank 0: F0 F1 B0 F2 B1 F3 B2 B3.
    assert deliveries(schedule, 1) == {
        Action(Op.RECV_F, 1, 2): (Action(Op.SEND_B, 1, 0),),
        Action(Op.RECV_F, 1, 3): (Action(Op.SEND_B, 1, 1),),
    }
