"""What the stages of a rank send to and receive from those of other ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import P2P, Pending
from .schedules.schedule import RECV_OPS, SEND_OPS, Action, Op, Schedule
from .split.carried import Carried, CarriedSpec
from .split.trees import TensorShape

_Half = tuple[bool, int, int | None]  # (is it a forward, stage, microbatch)
_MAX_TENSORS = 64  # in one message
_NUM_TAGS = 1 << 19  # messages that share a tag come in the order in which they were sent
_NEEDED = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
Key = tuple[int, int]
"""(stage, microbatch)."""


def described(action: Action) -> str:
    """An action as messages of errors and reports have it."""
    microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return f"pipeline action {action} (stage {action.stage}{microbatch})"


class Messages:
    """Outputs of stages on their way forward, and their gradients on the way back.

    The first message for a kind of batch (the shapes of its tensors) carries a description of its tensors; later ones
    are the tensors alone, which the sender checks against it. What is sent is held until it has arrived, as far as is
    known (see `deliveries`).
    """

    def __init__(self, schedule: Schedule, place: int, peers: P2P, device: torch.device) -> None:
        """place: this rank's on the pipe axis."""
        self._schedule = schedule
        self._peers = peers
        self._device = device
        self._deliveries = deliveries(schedule, place)
        # What stage receives for a kind of batch. None: nothing in this run, since its sender failed before that.
        self._specs: dict[tuple[int, Hashable], CarriedSpec | None] = {}
        self._returned: dict[tuple[int, Hashable], CarriedSpec] = {}  # what stages here have returned, sent or not
        self.difference: str | None = None
        """That a stage of this rank has returned another thing in this run than for earlier batches of the kind."""
        self.begin(())

    def begin(self, kinds: Sequence[Hashable]) -> None:
        """A run begins: nothing is under way. kinds: of the batch of each microbatch."""
        self._kinds = kinds
        self.difference = None
        self._specs = {known: spec for known, spec in self._specs.items() if spec is not None}
        self._arriving: dict[tuple[Op, Key], tuple[list[Pending], list[Tensor]]] = {}
        self._sent: dict[Action, list[tuple[Pending, Any]]] = {}  # oldest first

    def forget_kinds(self) -> None:
        """Between runs, on all ranks: what is sent for a batch may be another thing from now on."""
        self._specs.clear()
        self._returned.clear()

    @property
    def lacks_any(self) -> bool:
        """Whether a stage here receives nothing in this run, since one before it has failed."""
        return None in self._specs.values()

    @property
    def is_any_unused(self) -> bool:
        """Whether something was received that nobody has taken."""
        return bool(self._arriving)

    # -- sending ----------------------------------------------------------------------------------------------------

    def agreed(self, stage: int, microbatch: int, carried: Carried) -> Carried | None:
        """Zeros, of what stages have agreed on, in the place of another thing that one has returned. None: it is that.

        With an error at once the stages behind would wait for what never comes, on a device until the timeout. So the
        schedule goes on, and who runs it has to see to it that nothing of it counts.
        """
        spec = self._returned.setdefault((stage, self._kinds[microbatch]), carried.spec)
        if spec == carried.spec:
            return None
        if self.difference is None:
            self.difference = (
                f"pipeline: expected stage {stage} to return for microbatch {microbatch} what it had returned for a "
                f"batch of the same shapes, {_listed(spec)}; found {_listed(carried.spec)}. Stages must agree "
                "beforehand on what they send: the shapes of what a block returns may depend on those of the batch "
                "alone. No parameter was updated"
            )
        return Carried(
            tuple(torch.zeros(one.shape, dtype=one.dtype, device=self._device) for one in spec.tensors), spec
        )

    def send_output(self, action: Action, carried: Carried) -> None:
        place, what = self._schedule.peer_rank(action), described(action)
        known = (action.peer_stage, self._kind_of(action))
        if known not in self._specs:
            self._specs[known] = carried.spec
            self._hold(action, self._peers.send_object(carried.spec, place, self._tag(action, 0), what), None)
        assert self._specs[known] == carried.spec
        self.send(action, [tensor.detach() for tensor in carried.tensors])

    def send_zeros(self, action: Action) -> None:
        """In the place of what a stage that has failed does not give: the other end goes through its schedule."""
        is_forward = action.op is Op.SEND_F
        known = (action.peer_stage if is_forward else action.stage, self._kind_of(action))
        if is_forward and known not in self._specs:
            place, what = self._schedule.peer_rank(action), described(action)
            self._specs[known] = None
            self._hold(action, self._peers.send_object(None, place, self._tag(action, 0), what), None)
        shapes = self._shapes_of(known, is_forward)
        self.send(action, [torch.zeros(one.shape, dtype=one.dtype, device=self._device) for one in shapes])

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        place, what = self._schedule.peer_rank(action), described(action)
        for index, tensor in enumerate(tensors):
            values = tensor.contiguous()
            self._hold(action, self._peers.send(values, place, self._tag(action, index), what), values)

    def _hold(self, action: Action, pending: Pending, values: Any) -> None:
        """Keeps what is being sent until it has arrived."""
        self._sent.setdefault(action, []).append((pending, values))

    def wait_sent(self, num_left: int) -> None:
        """Lets go of what has arrived, and waits for the oldest until so many messages are left.

        See [Note: an order that cannot deadlock] in passes.py: waiting here is safe.
        """
        while self._sent:
            oldest = next(iter(self._sent))
            if len(self._sent) <= num_left and not all(pending.is_done for pending, _ in self._sent[oldest]):
                return
            self._wait(oldest)

    def _wait(self, send: Action) -> None:
        for pending, _ in self._sent.pop(send, ()):
            pending.wait()

    # -- receiving --------------------------------------------------------------------------------------------------

    def receive_output(self, action: Action) -> None:
        known = (action.stage, self._kind_of(action))
        if known not in self._specs:
            place, what = self._schedule.peer_rank(action), described(action)
            self._specs[known] = self._peers.receive_object(place, self._tag(action, 0), what)
        self._receive(action, self._shapes_of(known, is_forward=True))

    def receive_gradients(self, action: Action) -> None:
        """They have the shapes of what was sent."""
        self._receive(action, self._shapes_of((action.peer_stage, self._kind_of(action)), is_forward=False))

    def _shapes_of(self, known: tuple[int, Hashable], is_forward: bool) -> list[TensorShape]:
        """Of what a stage receives, or of the gradients that it gives back."""
        spec = self._specs[known]
        if spec is None:
            return []
        return [one for one, needs in zip(spec.tensors, spec.needs_grad, strict=True) if needs or is_forward]

    def _receive(self, action: Action, shapes: Sequence[TensorShape]) -> None:
        place, what = self._schedule.peer_rank(action), described(action)
        buffers = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in shapes]
        pending = [
            self._peers.receive(buffer, place, self._tag(action, index), what) for index, buffer in enumerate(buffers)
        ]
        self._arriving[action.op, (action.stage, action.microbatch or 0)] = (pending, buffers)

    def wait_for_needs_of(self, action: Action) -> None:
        """Returns when what the action needs of other ranks is there."""
        if action.op not in _NEEDED:
            return
        receive = Action(_NEEDED[action.op], action.stage, action.microbatch)
        arriving = self._arriving.get((receive.op, (action.stage, action.microbatch or 0)))
        if arriving is not None:
            for one in arriving[0]:
                one.wait()
            for send in self._deliveries.get(receive, ()):
                self._wait(send)

    def take_output(self, key: Key) -> Carried | None:
        """What stage key[0] has received; None: nothing from another rank."""
        if (Op.RECV_F, key) not in self._arriving:
            return None
        buffers, spec = self._arriving.pop((Op.RECV_F, key))[1], self._specs[key[0], self._kinds[key[1]]]
        return None if spec is None else Carried(tuple(buffers), spec).detached()

    def take_gradients(self, key: Key) -> list[Tensor] | None:
        """Of what stage key[0] has given; None: nothing from another rank."""
        return self._arriving.pop((Op.RECV_B, key))[1] if (Op.RECV_B, key) in self._arriving else None

    # -- pieces of it -----------------------------------------------------------------------------------------------

    def _kind_of(self, action: Action) -> Hashable:
        return self._kinds[action.microbatch or 0]

    def _tag(self, action: Action, index: int) -> int:
        """The same at both ends: of the earlier of the two stages, the microbatch, the direction and the tensor."""
        assert index < _MAX_TENSORS, index
        first = min(action.stage, action.peer_stage)
        backward = action.op in (Op.SEND_B, Op.RECV_B)
        number = (action.microbatch or 0) * self._schedule.num_stages + first
        return (2 * number + backward) * _MAX_TENSORS % _NUM_TAGS + index


def _listed(spec: CarriedSpec) -> str:
    """Shapes and dtypes, and what else two specs may differ in."""
    tensors = zip(spec.tensors, spec.needs_grad, strict=True)
    found = [f"{tuple(one.shape)} {one.dtype}{'' if needs else ' without gradient'}" for one, needs in tensors]
    return (
        f"[{', '.join(found)}] for {spec.num_arguments} arguments of '{spec.block}' at {[at for at, _ in spec.slots]}"
    )


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
