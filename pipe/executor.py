"""Run a rank's list of actions on tensors (`Executor`).

`messages.py` moves tensors between ranks, `stage.py` computes forwards, `backward.py` delays weight gradients, and a
`StageMemory` gathers, releases and reduces parameters. `Executor._act` has a case for each op.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..comm import P2P, CollectiveError
from ..model.patches import ModelPatches
from .backward import Entry, WeightGradients
from .messages import Key, Messages, described
from .schedules.schedule import COMPUTE_OPS, Action, Op, Schedule
from .split.carried import Carried
from .split.trees import leaves
from .stage import Stage

_MAX_SENDS = 4  # messages under way at a time: more would hold memory and hide no more latency


Scaled = Callable[[Tensor], Tensor]
"""Scale the loss of a microbatch before its backward."""


class StageMemory(Protocol):
    """Handles parameters and gradients of a stage at the moments that a schedule names."""

    def gather(self, stage: int) -> None:
        """Start to gather the stage's parameters."""

    def use(self, stage: int) -> None:
        """Wait for the gathered parameters: this rank, or a rank with different data, computes on the stage next."""

    def release(self, stage: int) -> None:
        """Free the gathered parameters."""

    def collect(self, stage: int) -> None:
        """Take the gradients of a microbatch from `param.grad`; more microbatches follow."""

    def collect_half(self, stage: int) -> None:
        """Take the gradients of an I before the next microbatch adds to them and autograd rounds the sum."""

    def reduce(self, stage: int) -> None:
        """Take the gradients of the last microbatch and reduce them over the data-parallel ranks."""


class _Run:
    """Tensors of a run of a schedule, by (stage, microbatch).

    input               from arrival to F; the entry that collects its gradient: until B or I
    output              from F until it is sent; the autograd graph: until B or I
    gradient of output  from arrival to B or I
    gradient of input   from B or I until it is sent
    """

    def __init__(self, microbatches: Sequence[Any], scaled: Scaled, stages: Iterable[int]) -> None:
        """stages: those of this rank."""
        self.microbatches = microbatches
        self.scaled = scaled
        self.losses: dict[int, Tensor] = {}  # by microbatch
        self.inputs: dict[Key, Carried] = {}
        self.entries: dict[Key, Entry] = {}
        self.graphs: dict[Key, list[GradientEdge]] = {}
        self.gradients: dict[Key, list[Tensor]] = {}
        self.outputs_to_send: dict[Key, Carried] = {}
        self.gradients_to_send: dict[Key, list[Tensor]] = {}
        self.num_left = Counter(dict.fromkeys(stages, len(microbatches)))  # backwards left of each stage
        self.halves: set[int] = set()  # stages with gradients of an I in `param.grad` whose W has not come

    @property
    def _held(self) -> tuple[dict[Key, Any], ...]:
        return self.inputs, self.entries, self.graphs, self.gradients, self.outputs_to_send, self.gradients_to_send

    @property
    def is_over(self) -> bool:
        """True if every tensor has been used or sent."""
        return not any(self._held)

    def free(self) -> None:
        """Drop all tensors, after a failure."""
        for held in self._held:
            held.clear()


class Executor:
    """Executes the actions of a rank in their order. Training and evaluation differ only in the schedule.

    Tensors are held by `_Run`, by `Messages` while they travel, and by `WeightGradients` from I to W.
    """

    def __init__(
        self,
        schedule: Schedule,
        place: int,
        stages: Mapping[int, Stage],
        memory: StageMemory,
        peers: P2P,
        device: torch.device,
        forward: Callable[[nn.Module, Any], Any],
        loss: Callable[[Any, Any], Tensor],
        patches: ModelPatches,
        around: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext(),
    ) -> None:
        """place: this rank's coordinate on the pipe axis. forward(module, microbatch) -> output.

        loss(output, microbatch) -> scalar. patches: takes the changes of the stages' modules back. around: a context
        that is entered for each F.
        """
        self.schedule = schedule
        # Called with (action, start, end) in seconds. An action starts when its messages have arrived.
        self.on_action: Callable[[Action, float, float], None] | None = None
        self._actions = schedule.actions[place]
        self._stages = stages
        self._memory = memory
        self.messages = Messages(schedule, place, peers, device)
        self._progress = peers.progress
        self._forward = forward
        self._loss = loss
        self._around = around
        splits = schedule.has_any(Op.I)
        self._weights = {
            index: WeightGradients(_modules_with_parameters(stage), patches)
            for index, stage in stages.items()
            if splits
        }
        self.difference: str | None = None
        """The error text if a stage of this rank returned different shapes than for an earlier batch of equal shapes.

        Of the last run, as `failure` and `has_failed` are."""
        self.failure: Exception | None = None
        """The exception that a stage of this rank raised."""
        self.has_failed = False
        """True if a stage of this rank, or an earlier stage that feeds it, raised."""
        self._begin(())

    def run(self, microbatches: Sequence[Any], scaled: Scaled = lambda loss: loss) -> list[Tensor]:
        """Execute all actions and add up the gradients of scaled(loss). Returns the losses, on the last stage's rank.

        microbatches: `schedule.num_microbatches`, the same on every rank of the pipe axis.
        If a stage raises, it computes nothing more and sends zeros, so that all ranks reach the end of the schedule.
        If `difference` or `has_failed` is set afterwards, all ranks must drop the results of this run; the remaining
        ranks do not know yet.
        Raises CollectiveError if a rank does not answer. An error has a note with its action.
        """
        assert len(microbatches) == self.schedule.num_microbatches, len(microbatches)
        self.failure, self.has_failed = None, False
        self._begin(microbatches, scaled)
        try:
            for action in self._actions:
                self._progress.at_unit(str(action))
                self.messages.wait_for_needs_of(action)
                started = time.perf_counter()  # after the wait: `on_action` times the work of this rank
                self._do(action)
                if self.on_action is not None:
                    self.on_action(action, started, time.perf_counter())
                self.messages.wait_sent(_MAX_SENDS)
            # Buffers of sends belong to this run, and the next run begins with nothing under way.
            self.messages.wait_sent(0)
        except BaseException as error:
            self._note(error, action)
            self._begin(())
            raise
        # After a failure on another rank, tensors of actions that were not computed are left.
        assert self.has_failed or self._run.is_over
        assert not self.messages.is_any_unused
        losses = [loss for _, loss in sorted(self._run.losses.items())]
        self.difference = self.messages.difference
        self._begin(())  # frees the batch
        return losses

    def pass_by(self) -> list[Tensor]:
        """Take part in the collectives of the data-parallel ranks with zero gradients, and compute nothing.

        All ranks of the pipe axis must call this together. Returns no losses.
        """
        self.difference, self.failure, self.has_failed = None, None, False
        self._begin(())
        # Count the backwards that do not run: collectives must come at the same actions as on the remaining ranks.
        self._run.num_left.update(dict.fromkeys(self._stages, self.schedule.num_microbatches))
        for action in self._actions:
            if action.op in (Op.GATHER, Op.RELEASE, Op.REDUCE):
                self._act(action)
            elif action.op in COMPUTE_OPS:
                self._memory.use(action.stage)
            self._begin_gradients(action)
            self._end_gradients(action)
        return []

    def _begin(self, microbatches: Sequence[Any], scaled: Scaled = lambda loss: loss) -> None:
        self._run = _Run(microbatches, scaled, self._stages)
        self.messages.begin([shapes_in(microbatch) for microbatch in microbatches])
        self._forget_weights()

    def _forget_weights(self) -> None:
        for weights in self._weights.values():
            weights.forget()

    def _do(self, action: Action) -> None:
        # Also after a failure: data-parallel ranks that have not failed gather the same parameters.
        if action.op in COMPUTE_OPS:
            self._memory.use(action.stage)
        self.has_failed = self.has_failed or self.messages.sender_failed
        # Collectives of the data-parallel ranks: they come at this action on all of them, failed or not.
        self._begin_gradients(action)
        if action.op in COMPUTE_OPS and not self.has_failed:
            try:
                self._act(action)
            except CollectiveError:
                raise  # a rank is lost, and no message reaches it
            except Exception as error:
                self._note(error, action)
                self.failure, self.has_failed = error, True
                self._run.free()  # perhaps memory ran out, and the messages that follow need some
                self._forget_weights()
        elif action.op in COMPUTE_OPS:
            self._drop_inputs(action)
        # A peer has posted its receive, or will: it must get a message of the agreed shapes.
        elif self.has_failed and action.op in (Op.SEND_F, Op.SEND_B):
            self.messages.send_zeros(action)
        else:
            self._act(action)
        self._end_gradients(action)

    def _drop_inputs(self, action: Action) -> None:
        """Free the message that arrived for an action that is not computed."""
        if action.op is Op.F:
            self.messages.take_output(_key_of(action))
        # W has no message: it uses tensors that its I has kept.
        elif action.op is not Op.W:
            self.messages.take_gradients(_key_of(action))

    def _note(self, error: BaseException, action: Action) -> None:
        error.add_note(f"pipeline: in {described(action)}, of schedule {self.schedule.name}")

    def _act(self, action: Action) -> None:
        """Do an action that has not failed."""
        key, run, weights = _key_of(action), self._run, self._weights
        match action.op:
            case Op.F:
                self._do_forward(action)
            case Op.B:
                self._do_backward(key, nullcontext())
            case Op.I:
                self._do_backward(key, weights[action.stage].put_off(key[1]))
            case Op.W:
                weights[action.stage].make(key[1])
            case Op.SEND_F:
                self.messages.send_output(action, run.outputs_to_send.pop(key))
            case Op.SEND_B:
                self.messages.send(action, run.gradients_to_send.pop(key))
            case Op.RECV_F:
                self.messages.receive_output(action)
            case Op.RECV_B:
                self.messages.receive_gradients(action)
            case Op.GATHER:
                self._memory.gather(action.stage)
            case Op.RELEASE:
                self._memory.release(action.stage)
            case Op.REDUCE:
                self._memory.reduce(action.stage)
            case Op.STEP:
                pass  # the engine updates after the list: the norm is over all stages

    def _do_forward(self, action: Action) -> None:
        key, run = _key_of(action), self._run
        stage, microbatch = self._stages[action.stage], run.microbatches[key[1]]
        # From another rank, or from the previous stage on this rank; neither for stage 0.
        received = self.messages.take_output(key) or run.inputs.pop(key, None)
        if received is not None and not self.schedule.is_forward_only:
            run.entries[key] = Entry(received)
            received = run.entries[key].opened(received)
        with self._around(action):
            output = stage.run(lambda module: self._forward(module, microbatch), received, form_of(microbatch))
            if stage.is_last:
                output = self._loss(output, microbatch)
        if stage.is_last:
            if not (output.requires_grad or self.schedule.is_forward_only):
                raise ValueError(
                    "pipeline: expected a loss with requires_grad=True, found requires_grad=False; was it computed "
                    "under torch.no_grad(), or detached?"
                )
            # Without its graph, which `_keep_graph` holds until the backward.
            run.losses[key[1]] = output.detach()
            self._keep_graph(key, [run.scaled(output)])
            return
        crosses = self.schedule.crosses(action.stage)
        agreed = self.messages.zeros_if_shapes_differ(*key, output) if crosses else None
        wanted = zip(output.tensors, output.spec.needs_grad, strict=True)
        # Zeros in the place of a differing output have no graph, so the backward of this microbatch does nothing.
        self._keep_graph(key, [tensor for tensor, needs_grad in wanted if needs_grad and agreed is None])
        if crosses:
            run.outputs_to_send[key] = output if agreed is None else agreed
        else:
            # The graph ends here too: the backward of each stage is a separate action.
            run.inputs[action.stage + 1, key[1]] = output.detached()

    def _do_backward(self, key: Key, weights: AbstractContextManager[None]) -> None:
        """weights: delays the gradients of weights in an I."""
        run = self._run
        graph = run.graphs.pop(key)
        gradients = self._gradients_of(key)
        with weights:
            if graph:  # empty if no tensor needs a gradient, or after zeros in the place of the output
                torch.autograd.backward(graph, gradients)
        del graph, gradients  # free them before `entry.gradients` may allocate zeros
        entry = run.entries.pop(key, None)
        if entry is None:
            return
        found = entry.gradients()
        if self.schedule.crosses(key[0] - 1):
            run.gradients_to_send[key] = found
        else:
            run.gradients[key[0] - 1, key[1]] = found

    def _gradients_of(self, key: Key) -> list[Tensor | None]:
        if self._stages[key[0]].is_last:
            # For a scalar loss autograd begins with a gradient of 1.
            return [None]
        received = self.messages.take_gradients(key)
        return [*(self._run.gradients.pop(key) if received is None else received)]

    def _keep_graph(self, key: Key, outputs: Sequence[Tensor]) -> None:
        """Hold the graph of the outputs until backward."""
        if not self.schedule.is_forward_only:  # edges do not hold values: these are freed as soon as they are sent
            self._run.graphs[key] = [get_gradient_edge(tensor) for tensor in outputs]

    def _begin_gradients(self, action: Action) -> None:
        if action.op in (Op.B, Op.I) and action.stage in self._run.halves:
            self._memory.collect_half(action.stage)

    def _end_gradients(self, action: Action) -> None:
        run, stage = self._run, action.stage
        if action.op is Op.I:
            run.halves.add(stage)
        if action.op in (Op.B, Op.W):
            run.halves.discard(stage)
            run.num_left[stage] -= 1
            # REDUCE takes the gradients of the last microbatch.
            if run.num_left[stage]:
                self._memory.collect(stage)


def _key_of(action: Action) -> Key:
    # Actions of a whole stage have no microbatch, and do not use their key.
    return action.stage, action.microbatch or 0


def _modules_with_parameters(stage: Stage) -> list[nn.Module]:
    """List the modules whose weight is a parameter of the stage. A computed weight (parametrization) does not count."""
    params = {id(param) for _, param in stage.named_parameters()}
    return [module for module in stage.module.modules() if id(module._parameters.get("weight")) in params]


def form_of(batch: Any) -> tuple[Hashable, ...]:
    """Describe a batch: its keys, and the type of each value. Other keys may take other branches of a forward."""
    return (tuple(batch) if isinstance(batch, Mapping) else (), *map(type, leaves(batch)))


def shapes_in(batch: Any) -> Hashable:
    """Describe a batch: its form, and shape and dtype of each tensor."""
    shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    return (form_of(batch), *shapes)
