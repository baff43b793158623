"""Messages between stages on different ranks: outputs forward, gradients of outputs backward (`Messages`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import P2P, Pending
from .schedules.schedule import RECV_OPS, SEND_OPS, Action, Op, Schedule
from .split.carried import Carried, CarriedSpec
from .split.trees import TensorShape

_Half = tuple[bool, int, int | None]  # (is a forward, stage, microbatch)
_NUM_TAGS, _TAGS_OF_MESSAGE = 1 << 19, 1 << 6  # tensors that share a tag arrive in the order in which they were sent
_RECEIVE_OF = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
Key = tuple[int, int]
"""(stage, microbatch)."""


def described(action: Action) -> str:
    """Name an action in errors and reports: "pipeline action 2F0 (stage 2, microbatch 0)"."""
    microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return f"pipeline action {action} (stage {action.stage}{microbatch})"


class Messages:
    """Sends outputs of stages forward and their gradients backward, and holds them until they have arrived.

    Batches with the same shapes are of one kind. Before the first message of a kind its `CarriedSpec` (shapes, dtypes,
    which tensors need gradients) is sent. Later messages are tensors alone, which the sender checks against the spec.
    `deliveries` tells when a sent tensor has arrived.
    """

    def __init__(self, schedule: Schedule, place: int, peers: P2P, device: torch.device) -> None:
        """place: this rank's coordinate on the pipe axis."""
        self._schedule = schedule
        self._peers = peers
        self._device = device
        self._deliveries = deliveries(schedule, place)
        # By receiving stage and kind of batch. None: the sender failed in this run before it knew its output.
        self._specs: dict[tuple[int, Hashable], CarriedSpec | None] = {}
        self._returned: dict[tuple[int, Hashable], CarriedSpec] = {}  # by returning stage of this rank, sent or not
        self.difference: str | None = None
        """The error text if a stage of this rank returned different shapes than for an earlier batch of the kind."""
        self.begin(())

    def begin(self, kinds: Sequence[Hashable]) -> None:
        """Begin a run with nothing under way. kinds: of each microbatch."""
        self._kinds = kinds
        self.difference = None
        # A None belongs to the failed run: the sender sends the spec again.
        self._specs = {receiver: spec for receiver, spec in self._specs.items() if spec is not None}
        self._arriving: dict[tuple[Op, Key], tuple[list[Pending], list[Tensor]]] = {}
        self._sent: dict[Action, list[tuple[Pending, Any]]] = {}  # oldest first

    def forget_kinds(self) -> None:
        """Forget all specs: stages may return different shapes from now on. Call it between runs, on all ranks."""
        # Both ends, since each decides by this table alone whether a spec is sent before the tensors.
        self._specs.clear()
        self._returned.clear()

    @property
    def sender_failed(self) -> bool:
        """True if a stage of this rank receives nothing in this run, because an earlier stage failed."""
        return None in self._specs.values()

    @property
    def is_any_unused(self) -> bool:
        """True if a received message was not taken."""
        return bool(self._arriving)

    # -- sending ----------------------------------------------------------------------------------------------------

    def zeros_if_shapes_differ(self, stage: int, microbatch: int, carried: Carried) -> Carried | None:
        """Return zeros if the stage returned other shapes than were agreed, and set `difference`; else None."""
        # The receiver allocates buffers by the spec of the first batch of this kind.
        spec = self._returned.setdefault((stage, self._kinds[microbatch]), carried.spec)
        if spec == carried.spec:
            return None
        # After an error here the next stages would wait for a message until the timeout. So the schedule goes on with
        # zeros, and the caller drops the results of the run.
        if self.difference is None:
            self.difference = (
                f"pipeline: stage {stage} returned for microbatch {microbatch} other shapes than for an earlier batch "
                f"of the same shapes: expected {_listed(spec)}, found {_listed(carried.spec)}. The shapes that a block "
                "returns may depend only on the shapes of the batch. No parameter was updated"
            )
        return Carried(tuple(self._zeros(spec.tensors)), spec)

    def send_output(self, action: Action, carried: Carried) -> None:
        """Start to send a stage's output, with its spec if the next stage does not know it."""
        receiver = (action.peer_stage, self._kind_of(action))
        if receiver not in self._specs:
            self._send_spec(action, receiver, carried.spec)
        # `zeros_if_shapes_differ` has replaced an output that differs.
        assert self._specs[receiver] == carried.spec
        self.send(action, [tensor.detach() for tensor in carried.tensors])

    def send_zeros(self, action: Action) -> None:
        """Start to send zeros in the place of a failed stage's tensors, so that the receiver's schedule goes on."""
        is_forward = action.op is Op.SEND_F
        receiver = (action.peer_stage if is_forward else action.stage, self._kind_of(action))
        # The spec None tells the receiver that no tensor follows in this run.
        if is_forward and receiver not in self._specs:
            self._send_spec(action, receiver, None)
        self.send(action, self._zeros(self._shapes_of(receiver, is_forward)))

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors to the peer stage."""
        rank, what = self._schedule.peer_rank(action), described(action)
        for index, tensor in enumerate(tensors):
            # `_hold` keeps this copy alive: the transport reads it until the message has arrived.
            values = tensor.contiguous()
            self._hold(action, self._peers.send(values, rank, self._tag(action, index), what), values)

    def _send_spec(self, action: Action, receiver: tuple[int, Hashable], spec: CarriedSpec | None) -> None:
        self._specs[receiver] = spec
        rank, what = self._schedule.peer_rank(action), described(action)
        self._hold(action, self._peers.send_object(spec, rank, self._tag(action, 0), what), None)

    def _zeros(self, shapes: Iterable[TensorShape]) -> list[Tensor]:
        return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in shapes]

    def _hold(self, action: Action, pending: Pending, values: Any) -> None:
        """Hold values until the message has arrived."""
        self._sent.setdefault(action, []).append((pending, values))

    def wait_sent(self, num_left: int) -> None:
        """Free messages that have arrived, and wait for the oldest until at most `num_left` are under way.

        The wait cannot deadlock: see [Note: an order that cannot deadlock] in passes.py.
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
        """Start to receive the output of the previous stage. Waits for its spec if it is not known."""
        receiver = (action.stage, self._kind_of(action))
        if receiver not in self._specs:
            rank, what = self._schedule.peer_rank(action), described(action)
            self._specs[receiver] = self._peers.receive_object(rank, self._tag(action, 0), what)
        self._receive(action, self._shapes_of(receiver, is_forward=True))

    def receive_gradients(self, action: Action) -> None:
        """Start to receive the gradients of a sent output. They have its shapes."""
        self._receive(action, self._shapes_of((action.peer_stage, self._kind_of(action)), is_forward=False))

    def _shapes_of(self, receiver: tuple[int, Hashable], is_forward: bool) -> list[TensorShape]:
        """List the shapes that a stage receives, or the shapes of the gradients that it sends back."""
        spec = self._specs[receiver]
        if spec is None:
            return []
        return [tensor for tensor, needs in zip(spec.tensors, spec.needs_grad, strict=True) if needs or is_forward]

    def _receive(self, action: Action, shapes: Sequence[TensorShape]) -> None:
        rank, what = self._schedule.peer_rank(action), described(action)
        buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in shapes]
        pending = [
            self._peers.receive(buffer, rank, self._tag(action, index), what) for index, buffer in enumerate(buffers)
        ]
        self._arriving[action.op, (action.stage, action.microbatch or 0)] = (pending, buffers)

    def wait_for_needs_of(self, action: Action) -> None:
        """Wait for the message that the action needs, if it needs a message."""
        if action.op not in _RECEIVE_OF:
            return
        receive = Action(_RECEIVE_OF[action.op], action.stage, action.microbatch)
        arriving = self._arriving.get((receive.op, (action.stage, action.microbatch or 0)))
        if arriving is not None:
            for pending in arriving[0]:
                pending.wait()
            for send in self._deliveries.get(receive, ()):
                self._wait(send)

    def take_output(self, key: Key) -> Carried | None:
        """Return the tensors that stage key[0] received, or None if the previous stage is on this rank or failed."""
        if (Op.RECV_F, key) not in self._arriving:
            return None
        buffers, spec = self._arriving.pop((Op.RECV_F, key))[1], self._specs[key[0], self._kinds[key[1]]]
        return None if spec is None else Carried(tuple(buffers), spec).detached()

    def take_gradients(self, key: Key) -> list[Tensor] | None:
        """Return the gradients of stage key[0]'s output, or None if the next stage is on this rank."""
        return self._arriving.pop((Op.RECV_B, key))[1] if (Op.RECV_B, key) in self._arriving else None

    def _kind_of(self, action: Action) -> Hashable:
        return self._kinds[action.microbatch or 0]

    def _tag(self, action: Action, index: int) -> int:
        """Number the earlier stage, the microbatch, the direction and the tensor: the same tag at both ends."""
        first = min(action.stage, action.peer_stage)
        backward = action.op in (Op.SEND_B, Op.RECV_B)
        number = (action.microbatch or 0) * self._schedule.num_stages + first
        return ((2 * number + backward) * _TAGS_OF_MESSAGE + index % _TAGS_OF_MESSAGE) % _NUM_TAGS


def _listed(spec: CarriedSpec) -> str:
    """Write all fields in which two specs may differ."""
    pairs = zip(spec.tensors, spec.needs_grad, strict=True)
    found = [f"{tuple(shape.shape)} {shape.dtype}{'' if needs else ' without gradient'}" for shape, needs in pairs]
    return (
        f"[{', '.join(found)}] for {spec.num_arguments} arguments of '{spec.block}' at {[at for at, _ in spec.slots]}"
    )


def deliveries(schedule: Schedule, place: int) -> Mapping[Action, tuple[Action, ...]]:
    """Map each receive of rank `place` to its sends that must have arrived when the received tensors are there.

    When tensors from a peer arrive, all that the peer used before it made them has arrived there. So these sends are
    done, and waiting for them returns at once. (gloo tells the state of a send only in a wait.)
    A send belongs to the first receive that proves its arrival. A send without a proof is in no list.
    """
    actions = schedule.actions[place]
    found: dict[Action, list[Action]] = {}
    for peer in {schedule.peer_rank(action) for action in actions if action.op in RECV_OPS}:
        compute = {
            (action.op is Op.F, action.stage, action.microbatch): position
            for position, action in enumerate(schedule.actions[peer])
            if action.op in (Op.F, Op.B, Op.I)
        }

        def position_there(action: Action, compute: dict[_Half, int] = compute) -> int:
            """Find the compute action that makes or uses the message in the peer rank's list."""
            return compute[action.op in (Op.SEND_F, Op.RECV_F), action.peer_stage, action.microbatch]

        with_peer = [action for action in actions if action.op in (*SEND_OPS, *RECV_OPS)]
        with_peer = [action for action in with_peer if schedule.peer_rank(action) == peer]
        receives = sorted((action for action in with_peer if action.op in RECV_OPS), key=position_there)
        made = [position_there(action) for action in receives]
        for action in with_peer:
            if action.op in SEND_OPS:
                # The peer's first message that it made after it used this send.
                proof = bisect_right(made, position_there(action))
                if proof < len(receives):
                    found.setdefault(receives[proof], []).append(action)
    return {receive: tuple(sends) for receive, sends in found.items()}
