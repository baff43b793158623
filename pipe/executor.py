"""Runs a rank's list of actions: the only place where a schedule meets tensors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..comm import Peers, Pending
from ..model.ledger import Ledger
from .deliveries import deliveries
from .schedules.action import Action, Op
from .schedules.schedule import Schedule
from .split.carried import Carried, CarriedSpec
from .split.trees import leaves
from .stage import Stage
from .weight_gradients import WeightGradients

_MAX_SENDS = 4  # messages that may have arrived or not; more would hold memory and hide nothing further
_MAX_TENSORS = 64  # in one message
_NUM_TAGS = 1 << 19  # messages that share a tag come in the order in which they were sent
_Key = tuple[int, int]
"""(stage, microbatch)."""


class StageMemory(Protocol):
    """What happens to parameters and gradients of a stage at the moments that a schedule names."""

    def gather(self, stage: int) -> None: ...
    def release(self, stage: int) -> None: ...
    def forward(self, stage: int) -> AbstractContextManager[object]: ...
    def backward(self, stage: int) -> AbstractContextManager[object]: ...

    def collect(self, stage: int) -> None:
        """The gradients of a microbatch are in `param.grad`, and others will follow."""

    def reduce(self, stage: int) -> None:
        """Those of the last microbatch are."""


class Executor:
    """Does one rank's actions in their order. Training and evaluation differ in the schedule alone.

    What is held, and until when, for a microbatch of a stage:

        received input      from RECV_F until its gradient has gone back
        output              from F until it has arrived, as far as is known (see `deliveries`); the graph, which needs
                            it or not, from F until B (or I)
        received gradient   from RECV_B until B (or I)
        x and dy of layers  from I until W

    Shapes: the first message for a kind of batch (the shapes of its tensors) carries a description of its tensors;
    later ones are the tensors alone, which the sender checks against it.
    """

    def __init__(
        self,
        schedule: Schedule,
        place: int,
        stages: Mapping[int, Stage],
        memory: StageMemory,
        peers: Peers,
        device: torch.device,
        forward: Callable[[nn.Module, Any], Any],
        loss: Callable[[Any, Any], Tensor],
        ledger: Ledger,
    ) -> None:
        """place: this rank's on the pipe axis. forward(module, microbatch) -> output; loss(output, microbatch).

        ledger: of what stands on the stages' modules.
        """
        self.schedule = schedule
        # (action, start, end), in seconds; it starts when what it needs of other ranks is there.
        self.on_action: Callable[[Action, float, float], None] | None = None
        self._actions = schedule.actions[place]
        self._deliveries = deliveries(schedule, place)
        self._stages = stages
        self._memory = memory
        self._peers = peers
        self._device = device
        self._forward = forward
        self._loss = loss
        splits = schedule.has_any(Op.I)
        self._weights = {
            index: WeightGradients(_modules_with_parameters(stage), ledger) for index, stage in stages.items() if splits
        }
        self._specs: dict[tuple[int, Hashable], CarriedSpec] = {}  # what stage receives for a kind of batch
        self._reset((), 1.0)

    def run(self, microbatches: Sequence[Any], scale: float = 1.0) -> list[Tensor]:
        """Does all actions; gradients of scale x loss are added up. Returns the losses, on the rank that has them.

        microbatches: `schedule.num_microbatches` of them, the same on every rank of the pipe axis. Errors say in a note
        which action they are from. Raises CollectiveError where another rank does not answer.
        """
        assert len(microbatches) == self.schedule.num_microbatches, len(microbatches)
        self._reset(microbatches, scale)
        try:
            for action in self._actions:
                self._peers.progress.at_unit(str(action))
                self._await_what_it_needs(action)
                started = time.perf_counter()
                _TABLE[action.op](self, action)
                if self.on_action is not None:
                    self.on_action(action, started, time.perf_counter())
                self._settle_sends(_MAX_SENDS)
            self._settle_sends(0)
        except BaseException as error:
            error.add_note(f"pipeline: in {self._described(action)}, of schedule {self.schedule.name}")
            self._reset((), 1.0)
            raise
        assert not (self._inputs or self._graphs or self._gradients or self._outgoing or self._arriving)
        return [loss for _, loss in sorted(self._losses.items())]

    @property
    def num_held(self) -> int:
        """Microbatches of stages whose graph is held."""
        return len(self._graphs)

    def _reset(self, microbatches: Sequence[Any], scale: float) -> None:
        self._microbatches = microbatches
        self._scale = scale
        self._losses: dict[int, Tensor] = {}
        self._inputs: dict[_Key, Carried] = {}
        self._graphs: dict[_Key, list[GradientEdge]] = {}
        self._gradients: dict[_Key, list[Tensor]] = {}  # of a stage's output
        self._outgoing: dict[tuple[Op, _Key], Sequence[Tensor] | Carried] = {}
        self._arriving: dict[tuple[Op, _Key], tuple[list[Pending], list[Tensor]]] = {}
        self._sent: dict[Action, list[tuple[Pending, Any]]] = {}  # oldest first
        self._num_left: Counter[int] = Counter(dict.fromkeys(self._stages, len(microbatches)))
        for weights in self._weights.values():
            weights.forget()

    # -- compute ----------------------------------------------------------------------------------------------------

    def _do_forward(self, action: Action) -> None:
        key = action.stage, action.microbatch or 0
        stage, microbatch = self._stages[action.stage], self._microbatches[key[1]]
        received = self._input_of(key)
        with self._memory.forward(action.stage):
            output = stage.run(lambda module: self._forward(module, microbatch), received)
            if stage.is_last:
                output = self._loss(output, microbatch)
        if received is not None and not self.schedule.is_forward_only:
            self._inputs[key] = received
        if stage.is_last:
            if not (output.requires_grad or self.schedule.is_forward_only):
                raise ValueError(
                    "pipeline: expected a loss that requires a gradient, found one that does not; was it computed "
                    "under torch.no_grad(), or detached?"
                )
            self._losses[key[1]] = output.detach()
            self._keep_graph(key, [output * self._scale])
            return
        wanted = zip(output.tensors, output.spec.needs_grad, strict=True)
        self._keep_graph(key, [tensor for tensor, needs_grad in wanted if needs_grad])
        following = action.stage + 1, key[1]
        if self.schedule.crosses(action.stage):
            self._outgoing[Op.SEND_F, key] = output
        else:
            self._inputs[following] = output.detached()

    def _do_backward(self, action: Action) -> None:
        self._go_backward(action, nullcontext())
        self._end_weights(action.stage)

    def _do_input_half(self, action: Action) -> None:
        assert action.microbatch is not None
        self._go_backward(action, self._weights[action.stage].put_off(action.microbatch))

    def _do_weight_half(self, action: Action) -> None:
        assert action.microbatch is not None
        with self._memory.backward(action.stage):
            self._weights[action.stage].make(action.microbatch)
        self._end_weights(action.stage)

    def _go_backward(self, action: Action, weights: AbstractContextManager[None]) -> None:
        key = action.stage, action.microbatch or 0
        graph = self._graphs.pop(key)
        gradients = self._gradients_of(key)
        with self._memory.backward(action.stage), weights:
            if graph:
                torch.autograd.backward(graph, gradients)
        del graph, gradients
        received = self._inputs.pop(key, None)
        if received is None:
            return
        wanted = [tensor for tensor, needs in zip(received.tensors, received.spec.needs_grad, strict=True) if needs]
        found = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanted]
        if self.schedule.crosses(action.stage - 1):
            self._outgoing[Op.SEND_B, key] = found
        else:
            self._gradients[action.stage - 1, key[1]] = found

    def _keep_graph(self, key: _Key, outputs: Sequence[Tensor]) -> None:
        """Keeps the graph without the values of the outputs, which can go as soon as they are sent."""
        if not self.schedule.is_forward_only:
            self._graphs[key] = [get_gradient_edge(tensor) for tensor in outputs]

    def _end_weights(self, stage: int) -> None:
        self._num_left[stage] -= 1
        if self._num_left[stage]:
            self._memory.collect(stage)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _do_send_forward(self, action: Action) -> None:
        key = action.stage, action.microbatch or 0
        carried = self._outgoing.pop((action.op, key))
        assert isinstance(carried, Carried)
        place, what = self.schedule.peer_rank(action), self._described(action)
        known = (action.peer_stage, self._kind_of_batch(key[1]))
        if known not in self._specs:
            self._specs[known] = carried.spec
            self._hold(action, self._peers.send_object(carried.spec, place, self._tag(action, 0), what), None)
        elif self._specs[known] != carried.spec:
            raise ValueError(
                f"pipeline: expected stage {action.stage} to return for microbatch {key[1]} what it had returned for a "
                f"batch of the same shapes, {self._specs[known]}; found {carried.spec}. Stages must agree beforehand "
                "on what they send: the shapes of what a block returns may depend on those of the batch alone"
            )
        for index, tensor in enumerate(carried.tensors):
            values = tensor.detach().contiguous()
            self._hold(action, self._peers.send(values, place, self._tag(action, index), what), values)

    def _do_send_backward(self, action: Action) -> None:
        gradients = self._outgoing.pop((action.op, (action.stage, action.microbatch or 0)))
        assert not isinstance(gradients, Carried)
        place, what = self.schedule.peer_rank(action), self._described(action)
        for index, gradient in enumerate(gradients):
            values = gradient.contiguous()
            self._hold(action, self._peers.send(values, place, self._tag(action, index), what), values)

    def _do_receive_forward(self, action: Action) -> None:
        key = action.stage, action.microbatch or 0
        known = (action.stage, self._kind_of_batch(key[1]))
        place, what = self.schedule.peer_rank(action), self._described(action)
        if known not in self._specs:
            self._specs[known] = self._peers.receive_object(place, self._tag(action, 0), what)
        shapes = self._specs[known].tensors
        buffers = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in shapes]
        self._receive(action, buffers)

    def _do_receive_backward(self, action: Action) -> None:
        """The gradients have the shapes of what was sent."""
        spec = self._specs[action.peer_stage, self._kind_of_batch(action.microbatch or 0)]
        wanted = [one for one, needs in zip(spec.tensors, spec.needs_grad, strict=True) if needs]
        self._receive(action, [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in wanted])

    def _receive(self, action: Action, buffers: list[Tensor]) -> None:
        place, what = self.schedule.peer_rank(action), self._described(action)
        pending = [
            self._peers.receive(buffer, place, self._tag(action, index), what) for index, buffer in enumerate(buffers)
        ]
        self._arriving[action.op, (action.stage, action.microbatch or 0)] = (pending, buffers)

    def _input_of(self, key: _Key) -> Carried | None:
        """What the stage before gave: from another rank, or from this one; None for the first stage."""
        if (Op.RECV_F, key) not in self._arriving:
            return self._inputs.pop(key, None)
        buffers = self._arrived(Op.RECV_F, key)
        spec = self._specs[key[0], self._kind_of_batch(key[1])]
        return Carried(tuple(buffers), spec).detached()

    def _gradients_of(self, key: _Key) -> list[Tensor | None]:
        if self._stages[key[0]].is_last:
            return [None]
        if (Op.RECV_B, key) in self._arriving:
            return [*self._arrived(Op.RECV_B, key)]
        return [*self._gradients.pop(key)]

    def _await_what_it_needs(self, action: Action) -> None:
        if action.op not in _NEEDED:
            return
        receive = Action(_NEEDED[action.op], action.stage, action.microbatch)
        arriving = self._arriving.get((receive.op, (action.stage, action.microbatch or 0)))
        if arriving is not None:
            for one in arriving[0]:
                one.wait()
            for send in self._deliveries.get(receive, ()):
                self._settle(send)

    def _arrived(self, op: Op, key: _Key) -> list[Tensor]:
        return self._arriving.pop((op, key))[1]

    def _hold(self, action: Action, pending: Pending, values: Any) -> None:
        """Keeps what is being sent until it has arrived."""
        self._sent.setdefault(action, []).append((pending, values))

    def _settle_sends(self, num_left: int) -> None:
        """Lets go of what has arrived, and waits for the oldest until so many messages are left.

        See [Note: an order that cannot deadlock] in passes.py: waiting here is safe.
        """
        while self._sent:
            oldest = next(iter(self._sent))
            if len(self._sent) <= num_left and not all(pending.is_done for pending, _ in self._sent[oldest]):
                return
            self._settle(oldest)

    def _settle(self, send: Action) -> None:
        for pending, _ in self._sent.pop(send, ()):
            pending.wait()

    def _tag(self, action: Action, index: int) -> int:
        """The same at both ends: of the earlier of the two stages, the microbatch, the direction and the tensor."""
        assert index < _MAX_TENSORS, index
        first = min(action.stage, action.peer_stage)
        backward = action.op in (Op.SEND_B, Op.RECV_B)
        number = (action.microbatch or 0) * self.schedule.num_stages + first
        return (2 * number + backward) * _MAX_TENSORS % _NUM_TAGS + index

    def _kind_of_batch(self, microbatch: int) -> Hashable:
        return shapes_in(self._microbatches[microbatch])

    # -- whole stages -----------------------------------------------------------------------------------------------

    def _do_gather(self, action: Action) -> None:
        self._memory.gather(action.stage)

    def _do_release(self, action: Action) -> None:
        self._memory.release(action.stage)

    def _do_reduce(self, action: Action) -> None:
        self._memory.reduce(action.stage)

    def _do_step(self, action: Action) -> None:
        """Nothing: the engine updates all parameters after the list, when the norm over all stages is known."""

    def _described(self, action: Action) -> str:
        microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
        return f"pipeline action {action} (stage {action.stage}{microbatch})"


def _modules_with_parameters(stage: Stage) -> list[nn.Module]:
    """The modules whose weight is the stage's own; one that is computed (a parametrization) is not looked at."""
    own = {id(param) for _, param in stage.named_parameters()}
    return [module for module in stage.module.modules() if id(module._parameters.get("weight")) in own]


def shapes_in(batch: Any) -> Hashable:
    """Shapes and dtypes of all tensors in a batch, the types of what else is in it, and the names of its parts."""
    names = tuple(batch) if isinstance(batch, Mapping) else ()
    shapes = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves(batch)]
    return (names, *shapes)


_NEEDED = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
_TABLE: Mapping[Op, Callable[[Executor, Action], None]] = {
    Op.F: Executor._do_forward,
    Op.B: Executor._do_backward,
    Op.I: Executor._do_input_half,
    Op.W: Executor._do_weight_half,
    Op.SEND_F: Executor._do_send_forward,
    Op.RECV_F: Executor._do_receive_forward,
    Op.SEND_B: Executor._do_send_backward,
    Op.RECV_B: Executor._do_receive_backward,
    Op.GATHER: Executor._do_gather,
    Op.RELEASE: Executor._do_release,
    Op.REDUCE: Executor._do_reduce,
    Op.STEP: Executor._do_step,
}
