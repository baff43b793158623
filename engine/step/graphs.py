"""Replay the device work of a microbatch, and of an update, as graphs of the accelerator (`compile.graphs`).

[Note: what is replayed]
    eager      features | inputs to the device | forward, backward, gathers, reductions | loss noted
    captured   as eager, but the device only records; the state of the gradients is kept; then as replayed
    replayed   features | inputs to static tensors | replay | the kept state of the gradients | loss noted

The hooks of `zero/hooks.py` run while a graph is captured. A replay repeats their device work at the same addresses,
and `GroupGradient.restore` sets the state that they would have left on the host. Units end each backward as they began
it.

A graph is valid for a batch of the same shapes, in a step that has had the same gradients at the same addresses, with
the same modules in training and the same frozen parameters (`Case`). The first `WARM_UP` microbatches of a case are
eager: libraries allocate and compile then. Ranks exchange their cases before each microbatch, since NCCL wants a
collective to be captured, and replayed, by all of its ranks.

Two things that change between replays are on the device, and the graph reads them: the loss scale
(`GradientScale.on_device`), and the state of the device's generator, which torch registers with each graph.

The sum over ranks with the norm stays outside. The graph of an update has Triton's launches and the gathers behind
them. On the device it reads the factor, the skip flag, and the numbers that follow from step and learning rates
(`UpdateLaunches`). It is valid for the gradients of a graph of a microbatch (`UpdateGraphs`).

All graphs of microbatches share a pool of memory. A graph may have its gradients at the addresses of an earlier graph's
activations. That is safe: a graph that is replayed while these gradients are in use was captured after them.

[Note: streams and pools] cuBLAS has a workspace for each stream, in the pool of the first graph that was captured on
the stream. torch 2.13 frees it with any graph of the stream, though other graphs still use it. So a stream has only
graphs that are dropped together. torch 2.11 keeps the workspace, and so the pool of dropped graphs, but refuses to
capture in it. So the graphs after them get another pool.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Mesh, Pending, World
from ...kernels.optimizer_step import UpdateLaunches
from ...model.patches import ModelPatches
from ...watch.log import logger
from ...zero.gradient import GradientState
from ...zero.hooks import UnitHooks
from ...zero.optimizer import ShardedOptimizer
from ...zero.reductions import OnFinal
from ...zero.sequence import UnitSequence
from ...zero.shard_state import ShardState
from ..blueprint.blueprint import Blueprint
from .batch import ModelCall, map_tensors
from .model_runner import ModelRunner, check_loss
from .steps import Steps

WARM_UP = 2
_MAX_COUNTED = 1000  # cases of which the times are counted
_EAGER = "eager"
_MODE = "thread_local"  # a loader that pins memory, or a checkpoint's writer, may call the device during a capture
Case = tuple[tuple[str, int | None], ...]
"""What a graph is valid for: (text, number of the state) by rank; once if it is equal on all ranks."""


def graphs_of(device: torch.device) -> Any:
    """Return the module with `CUDAGraph` and `graph` for a device; None if it has no graphs of this form."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "CUDAGraph") else None


def are_possible(blueprint: Blueprint, world: World) -> bool:
    """Return whether the device has graphs. Raise ValueError if a graph could not repeat what the config asks for."""
    if world.device.type == "cpu":
        logger.info("config: compile.graphs: true has no effect here: the CPU launches nothing")
        return False
    if graphs_of(world.device) is None:
        raise ValueError(
            f"compile.graphs: expected a device with torch.cuda's graphs, found {world.device.type}; leave it out"
        )
    if world.size > 1 and world.waits_on_host:
        raise ValueError(
            "compile.graphs: expected a process group with collectives for graphs (NCCL), found "
            f"{world.backend}, and the host waits for its collectives; make a group for the device, or leave "
            "compile.graphs out"
        )
    if blueprint.optimizer.sends_signs:
        raise ValueError(
            "compile.graphs: expected gradients that each step sums alike, found the optimizer "
            f"{blueprint.config.optimizer.type!r}: it sends signs after some steps; leave compile.graphs out"  # type: ignore[union-attr]
        )
    if world.size > 1:
        # NCCL, which reads this at its first capture, registers the buffers of captured collectives. With torch's
        # expandable segments, which `lowtide launch` sets, replays then hang or fail.
        # Source: https://github.com/pytorch/pytorch/issues/158029
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return True


class ReplayedSequence(UnitSequence):
    """A sequence that may replay a backward: then `Steps` counts it, and the host gathers and reduces nothing."""

    is_replayed = False

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        if not self.is_replayed:
            super().begin_backward(boundary, on_final)

    def end_backward(self) -> None:
        if not self.is_replayed:
            super().end_backward()


@dataclass(frozen=True)
class _Graph:
    """The graph of a microbatch. inputs: its static tensors. loss: (), of the last replay.

    after: number of the final state of the gradients.
    """

    graph: Any
    inputs: Sequence[Tensor]
    loss: Tensor
    after: int


@dataclass(frozen=True)
class _UpdateGraph:
    """The graph of an update. factor, skip: (1,) on the device, see `SummedStep.factor_and_skip`."""

    graph: Any
    launches: UpdateLaunches
    gradients: Sequence[Tensor | None]  # that it reads
    factor: Tensor
    skip: Tensor


class UpdateGraphs:
    """Replays updates of gradients that were computed by graphs."""

    def __init__(self, optimizer: ShardedOptimizer, device: torch.device, say: Callable[[str], None]) -> None:
        """device: that has graphs. say: writes a line to the log, once."""
        self._optimizer = optimizer
        self._torch = graphs_of(device)
        self._stream = self._torch.Stream(device)  # [Note: streams and pools]
        self._pool = self._torch.graph_pool_handle()
        self._say = say
        self.graphs: dict[Case, _UpdateGraph] = {}
        """By the case of the last microbatch, which is the same on all ranks."""
        self.case: Case | None = None
        """Of the last microbatch; None: it was eager."""
        # All graphs are valid for these: addresses of states, options by group, and steps that parameters missed.
        self._addresses: list[int] = []
        self._groups: list[int] = []
        self._missed: dict[int, int] = {}

    def have_moved(self) -> bool:
        """Return whether states that a graph changes have other memory."""
        return bool(self.graphs) and self._addresses != self._places()

    def update_all(
        self,
        gradient_scale: float | Tensor,
        on_updated: Callable[[ShardState], None] | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Do `ShardedOptimizer.update_all`, eagerly unless the gradients are those of a graph."""
        graph, case = None, self.case
        # An update consumes the case: without another replay the gradients are not those of a graph.
        self.case = None
        if skip is None:
            self._say(f"updates run eagerly: {self._optimizer.kind} waits for the norm on the host")
        elif self._optimizer.counts.unused:
            self._say("an update runs eagerly: a parameter has no gradient")
        elif case is not None and isinstance(gradient_scale, Tensor):
            graph = self._graph_of(case, gradient_scale, skip)
        if graph is None:
            self._optimizer.update_all(gradient_scale, on_updated, skip)
            return
        assert isinstance(gradient_scale, Tensor) and skip is not None
        self._optimizer.begin_step()
        # After `begin_step`, which counts this step: bias corrections and learning rates follow from its number.
        graph.launches.fill(self._optimizer.num_steps)
        # The graph reads the factor and the flag at these addresses, and this step has computed them elsewhere.
        torch._foreach_copy_([graph.factor, graph.skip], [gradient_scale, skip])
        graph.graph.replay()
        graph.launches.note_changes()

    def forget(self) -> None:
        for graph in self.graphs.values():
            graph.graph.reset()
        self.graphs.clear()
        self._pool = self._torch.graph_pool_handle()  # [Note: streams and pools]
        self.case = None

    def _graph_of(self, case: Case, factor: Tensor, skip: Tensor) -> _UpdateGraph | None:
        """Return the graph for the gradients that a microbatch has left, perhaps a new one. None: none is possible."""
        counts = self._optimizer.counts
        groups = list(map(id, self._optimizer.param_groups))
        if (groups, counts.missed) != (self._groups, self._missed):
            self.forget()
            self._groups, self._missed = groups, dict(counts.missed)
        if case not in self.graphs:
            found = self._optimizer.launches()
            if found is None:
                self._say("updates run eagerly: Triton has no kernel for some of the shards")
                return None
            self.graphs[case] = self._capture(*found, factor.clone(), torch.ones_like(skip))
        graph = self.graphs[case]
        gradients = [shard.gradient.shard for shard in self._optimizer.shards]
        # The graph has the addresses of these tensors. A caller may have set another gradient.
        are_same = all(one is other for one, other in zip(gradients, graph.gradients, strict=True))
        return graph if are_same else None

    def _places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._optimizer.held()]

    def _capture(
        self, launches: UpdateLaunches, shards: Sequence[ShardState], factor: Tensor, skip: Tensor
    ) -> _UpdateGraph:
        # Triton compiles and loads now, outside of the capture. `skip` is not 0: nothing changes.
        # + 1: `begin_step` has not counted the step yet.
        launches.fill(self._optimizer.num_steps + 1)
        launches.run(factor, skip, lambda number: None)
        graph, pending = self._torch.CUDAGraph(), list[Pending]()

        def send(number: int) -> None:
            if shards[number].group.axes.are_refreshed:
                pending.append(shards[number].group.refresh(is_update=True))

        with _captures(self._torch.graph(graph, self._pool, self._stream, capture_error_mode=_MODE)):
            launches.run(factor, skip, send)
            for one in pending:
                one.wait()
        logger.info("compile.graphs: captured an update of %d shards", len(shards))
        gradients = [shard.gradient.shard for shard in self._optimizer.shards]
        self._addresses = self._places()
        return _UpdateGraph(graph, launches, gradients, factor, skip)


class GraphRunner(ModelRunner):
    """A `ModelRunner` whose `train` and updates replay graphs. Other calls, such as `engine(...)`, run eagerly."""

    def __init__(
        self,
        module: nn.Module,
        passes: ReplayedSequence,
        hooks: UnitHooks,
        model_call: ModelCall,
        mesh: Mesh,
        patches: ModelPatches,
        optimizer: ShardedOptimizer,
        max_graphs: int,
    ) -> None:
        """max_graphs: of microbatches, that are kept."""
        super().__init__(module, passes, hooks, model_call, mesh, patches)
        self._sequence = passes
        self._mesh = mesh
        device = mesh.world.device
        self._torch = graphs_of(device)
        self._stream = self._torch.Stream(device)  # [Note: streams and pools]
        self._pool = self._torch.graph_pool_handle()  # without it each graph would keep separate memory
        self._max_graphs = max_graphs
        self.graphs: dict[Case, _Graph] = {}
        """Those that are captured."""
        self._inputs: dict[str, list[Tensor]] = {}  # by shapes
        self._times = Counter[tuple[str, ...]]()  # by the texts of a case
        self._states: list[Sequence[GradientState]] = [()]  # between microbatches; the first is that of a new step
        self._now: int | None = 0  # number of the current state; None: an eager microbatch has left another
        self._seed: Tensor | None = None
        self._said = set[str]()
        self.updates = UpdateGraphs(optimizer, device, self._say)
        self._addresses: list[int] = []  # of parameters and buffers, when the graphs were captured
        self._sums: list[int] = []  # addresses of the sums of microbatches that the graphs use
        self._generation = 0  # grows when graphs are dropped: other ranks may keep theirs
        patches.callback(self._forget)

    def train(self, steps: Steps, batch: Any) -> None:
        # After a backward by hand in the same step the gradients are in a state that no graph knows.
        self._now = 0 if not steps.accumulated.num_begun else None
        # In each step, as `Steps.register_groups` makes another `StepUpdate` after a group was added.
        steps.update.update_all = self.updates.update_all
        shards = [group.shard for unit in self.passes.units for group in unit.groups]
        addresses = [tensor.data_ptr() for tensor in chain(shards, self._module.buffers())]
        # `engine.offload_states` moves gradients and states.
        if addresses != self._addresses or self._sums_now() != self._sums or self.updates.have_moved():
            if self._addresses:
                self._say("graphs begin anew: parameters, buffers or states have other memory than in the last step")
            self._forget()
            self._addresses = addresses
        for microbatch in self.model_call.microbatches_of(batch, steps.accumulated.accumulation):
            steps.begin_forward([microbatch], partial(self._output, steps, microbatch))
            ready = self.model_call.ready(microbatch, steps.scale.mark_input)
            why = self._why_eager(steps, ready)
            if why:
                self._say(f"a microbatch runs eagerly: {why}")
            text = _EAGER if why else self._text(steps, ready)
            # Ranks without data exchange no cases.
            case = ((_EAGER, None),) if steps.join.is_open else tuple(self._mesh.gather_values((text, self._now)))
            if not self._has_graph(case):
                self._run_eagerly(steps, ready)
            else:
                self._run_graph(steps, ready, case)

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self._say("engine(...) runs eagerly: only engine.train_step replays graphs")
        return super().forward(steps, args, kwargs)

    def register_groups(self, units: Any) -> None:
        super().register_groups(units)
        self._forget()

    # -- the choice of a graph ------------------------------------------------------------------------------------

    def _why_eager(self, steps: Steps, ready: Any) -> str:
        """Return why no graph can have this microbatch; "" if one can."""
        if steps.join.is_open:
            return "engine.join()"
        if steps.features.around_forward:
            return "a profile, a memory report or a check looks into its forward"
        if any(tensor.requires_grad for tensor in _tensors_of(ready)):
            return "an input requires a gradient"
        return ""

    def _text(self, steps: Steps, ready: Any) -> str:
        """Describe all that a graph depends on beside the state."""
        boundary = steps.accumulated.would_complete(1)
        modes = "".join("01"[module.training] for module in self._module.modules())
        frozen = "".join("01"[param.requires_grad] for param in self.whole.params.values())
        return f"{_shapes_of(ready)} {boundary} {modes} {frozen} {self._generation}"

    def _has_graph(self, case: Case) -> bool:
        """Return whether the microbatch is replayed, perhaps after a capture. Count its times."""
        if case in self.graphs:
            return True
        texts = tuple(text for text, _ in case)
        # Counted without the state of the gradients: warm-up is about allocations and compilers, not about sums.
        if len(self._times) == _MAX_COUNTED:
            self._times.clear()
            self._say(
                f"{_MAX_COUNTED} kinds of microbatches: shapes, or values that are not tensors, change all the time, "
                "and each kind runs eagerly at first. Pad batches to few shapes, and leave out values that the model "
                "ignores"
            )
        self._times[texts] += 1
        if _EAGER in texts or any(now is None for _, now in case) or self._times[texts] <= WARM_UP:
            return False
        if len(self.graphs) < self._max_graphs:
            return True
        self._say(
            f"{self._max_graphs} graphs are captured (compile.max_graphs); microbatches of other shapes run eagerly. "
            "Pad batches to few shapes, or set compile.max_graphs"
        )
        return False

    def _say(self, text: str) -> None:
        """Write a line to the log, once."""
        if text not in self._said:
            self._said.add(text)
            logger.info("compile.graphs: %s", text)

    def _forget(self) -> None:
        """Drop all graphs: the engine is closed, or parameters or gradients have other memory."""
        for graph in self.graphs.values():
            graph.graph.reset()
        self.graphs.clear()
        self._pool = self._torch.graph_pool_handle()  # [Note: streams and pools]
        self.updates.forget()
        self._generation += 1
        self._times.clear()
        self._states, self._sums = self._states[:1], []

    # -- eager, captured, replayed --------------------------------------------------------------------------------

    def _run_eagerly(self, steps: Steps, ready: Any) -> None:
        with self.passes.failing_forward(), steps.features.around():
            output = steps.scale.mark_output(self.model_call.output(self._module, ready))
            loss = self.model_call.loss(output, ready)
            del output
        self.backward(steps, loss)
        self._now = self.updates.case = None

    def _run_graph(self, steps: Steps, ready: Any, case: Case) -> None:
        inputs = _tensors_of(ready)
        if steps.scale.can_differ_from_1:
            if self._seed is None:
                self._seed = torch.zeros((), dtype=torch.float64, device=self._mesh.world.device)
            # A fill outside of the graph: the loss scale may have changed since the capture.
            self._seed.fill_(steps.scale.seed)

        def run() -> None:
            graph = self.graphs.get(case)
            if graph is None:
                graph = self.graphs[case] = self._capture(steps, ready, case)
            if inputs:
                torch._foreach_copy_(list(graph.inputs), inputs)
            graph.graph.replay()
            for gradient, state in zip(steps.gradients, self._states[graph.after], strict=True):
                gradient.restore(state)
            self._now, self.updates.case = graph.after, case
            steps.accumulated.losses.append(graph.loss.clone())  # the next replay overwrites it

        self._sequence.is_replayed = True
        try:
            steps.backward(run)
        finally:
            self._sequence.is_replayed = False

    def _capture(self, steps: Steps, ready: Any, case: Case) -> _Graph:
        """Record a microbatch. Nothing is computed: the gradients get their values by the first replay."""
        graph = self._torch.CUDAGraph()
        found = _tensors_of(ready)
        shapes = _shapes_of(ready)
        if shapes not in self._inputs:
            self._inputs[shapes] = [tensor.clone() for tensor in found]
        static = iter(self._inputs[shapes])
        ready = map_tensors(ready, lambda tensor: next(static))
        before = [gradient.state() for gradient in steps.gradients]
        steps.scale.on_device = self._seed
        first: Exception | None = None
        try:
            with _captures(self._torch.graph(graph, self._pool, self._stream, capture_error_mode=_MODE)):
                try:
                    loss = self._record(steps, ready)
                except Exception as error:
                    first = error  # the end of an invalid capture raises another error, without the cause
                    raise
        except Exception as error:
            first = first or error
            if isinstance(first, RuntimeError):
                raise _not_captured(first) from first
            raise first from None
        finally:
            steps.scale.on_device = None
        logger.info(
            "compile.graphs: captured microbatch %d of a step, with inputs %s (graph %d of %d)",
            steps.accumulated.num_microbatches + 1,
            shapes,
            len(self.graphs) + 1,
            self._max_graphs,
        )
        return _Graph(graph, self._inputs[shapes], loss, self._state(steps, before))

    def _record(self, steps: Steps, ready: Any) -> Tensor:
        with self.passes.failing_forward():
            loss = self.model_call.loss(self.model_call.output(self._module, ready), ready)
        check_loss(loss, "backward")
        # Past the methods of `ReplayedSequence`, which do nothing while `is_replayed`: here the hooks must run.
        UnitSequence.begin_backward(self._sequence, steps.accumulated.is_complete, None)
        steps.scale.apply(loss).backward()  # type: ignore[no-untyped-call]
        UnitSequence.end_backward(self._sequence)
        return loss.detach()

    def _state(self, steps: Steps, before: Sequence[GradientState]) -> int:
        """Return the number of the state after a capture: that before it, if its tensors and facts are the same."""
        after = [gradient.state() for gradient in steps.gradients]
        assert self._now is not None
        # An equal state gives an equal `Case`. So the third microbatch of a step and those after it replay the graph of
        # the second, except the last microbatch.
        if self._now and all(one.is_at(other) for one, other in zip(before, after, strict=True)):
            return self._now
        self._states.append(after)
        self._sums = self._sums_now()
        return len(self._states) - 1

    def _sums_now(self) -> list[int]:
        return [state.flat.data_ptr() for state in chain(*self._states) if state.flat is not None]


@contextmanager
def _captures(graph: Any) -> Iterator[None]:
    """Enter the context of a capture, without collections of garbage.

    One may free a graph, or pinned memory, of an engine that nobody closed. The device refuses that meanwhile, and ends
    the capture.
    """
    collects, stream = gc.isenabled(), torch.accelerator.current_stream()
    gc.disable()
    try:
        with graph:
            yield
    finally:
        # torch leaves the stream of the capture current if the capture cannot end.
        torch.accelerator.set_stream(stream)
        if collects:
            gc.enable()


def _tensors_of(ready: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(ready, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _shapes_of(ready: Any) -> str:
    """Describe a batch without the values of its tensors."""
    return repr(map_tensors(ready, lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()}"))


def _not_captured(error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        "compile.graphs: expected a forward and a backward that only launch work on the device, found an error while a "
        f"graph was captured: {str(error).partition(chr(10))[0]}. A graph cannot hold a value that the host reads "
        "(item, bool, a mask as an index), a copy from the host, or a wait: the traceback above shows the line. Change "
        "it, or leave compile.graphs out"
    )
