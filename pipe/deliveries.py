"""What a rank learns about its own messages from those that it receives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from .schedules.action import RECV_OPS, SEND_OPS, Action, Op
from .schedules.schedule import Schedule

_Half = tuple[bool, int, int | None]
"""(is it a forward, stage, microbatch)."""


def deliveries(schedule: Schedule, place: int) -> Mapping[Action, tuple[Action, ...]]:
    """Each receive of rank `place` -> those of its sends that must have arrived once what it receives is there.

    The other rank made what is received after it had used what was sent. So a buffer can be let go without asking for
    how far its message is, which some backends (gloo) tell only to who waits for it; and waiting for it then does not
    wait. A send stands with the receive that tells of it first; sends that none tells of are left out.
    """
    own = schedule.actions[place]
    found: dict[Action, list[Action]] = {}
    for peer in {schedule.peer_rank(action) for action in own if action.op in RECV_OPS}:
        compute = {
            (action.op is Op.F, action.stage, action.microbatch): position
            for position, action in enumerate(schedule.actions[peer])
            if action.op in (Op.F, Op.B, Op.I)
        }

        def position_there(action: Action, compute: dict[_Half, int] = compute) -> int:
            """Of what made the message, or uses it, in the other rank's list."""
            return compute[action.op in (Op.SEND_F, Op.RECV_F), action.peer_stage, action.microbatch]

        with_peer = [action for action in own if action.op in (*SEND_OPS, *RECV_OPS)]
        with_peer = [action for action in with_peer if schedule.peer_rank(action) == peer]
        receives = sorted((action for action in with_peer if action.op in RECV_OPS), key=position_there)
        made = [position_there(action) for action in receives]
        for action in with_peer:
            if action.op in SEND_OPS:
                teller = bisect_right(made, position_there(action))
                if teller < len(receives):
                    found.setdefault(receives[teller], []).append(action)
    return {receive: tuple(sends) for receive, sends in found.items()}
