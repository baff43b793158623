"""The factors between the gradient of a loss and the mean gradient of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ...parallel.chunked_logits import ChunkedLogits
from ...zero.autograd import GraphTask, current_graph_task
from ...zero.loss_scale import LossScaler
from ...zero.sequence import StateError
from ..config.config import Config
from .batch import replace_tensors
from .features import StepFeature, StepResult

Root = Tensor | GradientEdge
Listener = Callable[[Sequence[Root], Sequence[Root] | None], Sequence[Root]]
"""(roots of a backward, inputs of `torch.autograd.grad`; None: of a backward, which adds to `grad`) -> new roots."""

_NAME = "_engine_run_backward"  # torch.autograd.backward and .grad call it, and Tensor.backward calls these


def on_backward_start(listener: Listener) -> Callable[[], None]:
    """Call a bound method at the start of each outermost backward. Return a function that ends it.

    The method's object is not kept alive. torch has no hook for this, so its function is replaced while anybody
    listens.
    """
    starts = vars(torch.autograd)[_NAME]
    if not isinstance(starts, _Starts):
        starts = vars(torch.autograd)[_NAME] = _Starts(starts)
    reference = weakref.WeakMethod(listener)
    starts.listeners.append(reference)

    def end() -> None:
        starts.listeners.remove(reference)
        # If foreign code has wrapped ours since, ours stays inside its wrapper, and calls torch's function alone.
        if not starts.listeners and vars(torch.autograd)[_NAME] is starts:
            vars(torch.autograd)[_NAME] = starts.run

    return end


class _Starts:
    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.listeners: list[weakref.WeakMethod[Listener]] = []

    def __call__(self, roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
        # A nested run (reentrant checkpointing) begins with gradients that have the factor already.
        if current_graph_task() < 0:
            # torch calls _engine_run_backward(roots, gradients, retain_graph, create_graph, inputs, ...).
            inputs = None if kwargs["accumulate_grad"] else args[3]
            for reference in list(self.listeners):
                listener = reference()
                if listener is not None:
                    roots = listener(roots, inputs)
        return self.run(roots, *args, **kwargs)


_IN_PART = (
    "backward: expected the whole loss through engine.scale(), found a part of it without, as in "
    "(engine.scale(a) + b).backward(): call engine.scale(a + b).backward(), or (a + b).backward()"
)
_EDGE = "lowtide: edge of the engine"  # a key in the metadata of nodes of the graph


class GradientScale:
    """Turns sums over microbatches and data-parallel ranks into means.

        loss --- x seed ---> param.grad --- summed ---> shard --- x grad_scale ---> update

    The update multiplies by `Steps.grad_scale` in its pass over the shard. The seed is 1 if possible: then each tensor
    in the graph has the gradient of the loss as the caller passed it, also inputs of the engine and the graph before
    them. The seed differs from 1 in float16, whose small gradients would be lost, and if the config says so.

    If the engine gets the loss (`apply`), the whole graph is multiplied. Leaves outside of the engine, and the graph
    before it, get their gradients divided; hooks between output and loss see them before the division. Else only the
    gradient of the engine's output is multiplied:

        other parameters -> input |edge  engine's forward  edge| output -> other parameters -> loss
                  divided here ----^        multiplied here ----^              or there ----^  and divided on the way

    A loss may read the engine's parameters past its output: a weight in a penalty, a part of the model that was called
    by itself, a loss that a block keeps. When the backward of that loss begins, it is multiplied as a given loss
    (`begin`).
    """

    def __init__(self, config: Config, data_size: int, loss_scaler: LossScaler, own: Iterable[nn.Parameter]) -> None:
        """data_size: the number of data-parallel ranks. own: the engine's parameters."""
        is_mean = config.gradient_allreduce_op == "mean"
        # With the op "sum", gradients are added up over ranks, and averaged over microbatches alone.
        self.num_summed = (data_size if is_mean else 1) * (config.gradient_accumulation_steps or 1)
        """Microbatches, of all ranks, of which the update takes the mean."""
        self.loss_scaler = loss_scaler
        self._fixed = _fixed_part(config, data_size)
        self._own = frozenset(map(id, own))
        self._entered: list[Node] = []  # nodes that made the inputs of the running forward
        self._given: weakref.ref[GraphTask] | None = None  # the backward whose loss was multiplied
        self._factors: dict[tuple[Node, float], RemovableHandle] = {}  # hooks in that backward
        self._given_edges: set[Node] = set()  # its outputs with the factor in that backward
        self._earlier_edges: set[Node] = set()  # its outputs before another forward
        self._applied_in = -1  # the last run of autograd with the seed, from a given loss or from an output
        self.on_device: Tensor | None = None
        """() float64 on the device: `seed` in a graph that is captured for all loss scales; else None."""
        self.can_differ_from_1 = config.fp16.enabled or self._fixed != 1.0
        """Whether `seed` can be anything but 1 in this training."""

    @property
    def seed(self) -> float:
        """Return the factor of the loss in the backward of this microbatch."""
        return self.loss_scaler.scale * self._fixed

    @property
    def is_given(self) -> bool:
        """Return True in the backward of a loss that was multiplied."""
        return self._given is not None and self._given() is not None

    def mark_input(self, tensor: Tensor) -> Tensor:
        """Return an input of the engine that requires a gradient, as its forward must see it."""
        if self.seed == 1.0 or not torch.is_grad_enabled():
            return tensor
        # A view, since the caller may use the same tensor beside the engine, where gradients have no factor.
        inside = tensor.view_as(tensor)
        inside.register_hook(lambda gradient: _Edge.apply(gradient, self, False))  # type: ignore[no-untyped-call]
        self._entered.append(get_gradient_edge(tensor).node)
        return inside

    def mark_output(self, output: Any) -> Any:
        """Return the output of a forward as the caller must see it."""
        if self.seed == 1.0:
            return output
        entered, self._entered = tuple(self._entered), []

        def marked(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ChunkedLogits):
                return tensor.mapped(made_outside)  # a loss of tiled logits has the graph of the hidden values
            # A leaf has no node to mark. `begin` finds the parameters that a loss reads directly.
            return tensor if tensor.grad_fn is None else made_outside(tensor)

        def made_outside(tensor: Tensor) -> Tensor:
            # A mark for each tensor, since a forward may return both a loss and its logits.
            outside = cast(Tensor, _Outside.apply(tensor, self))  # type: ignore[no-untyped-call]
            assert outside.grad_fn is not None
            _metadata(outside.grad_fn)[_EDGE] = {id(self): entered}
            return outside

        return replace_tensors(output, marked)

    def check_applied(self) -> None:
        """Raise StateError if gradients have come without the seed in the run of autograd that ends."""
        if self.seed != 1.0 and self._applied_in != current_graph_task():
            raise StateError(
                f"loss.backward(): expected a loss of the output of engine(...), which has the factor {self.seed:g} "
                "of float16's loss scale (or prescale_gradients, gradient_predivide_factor), found a loss without it: "
                "call engine(...) for the forward, or `engine.scale(loss).backward()`"
            )

    def apply(self, loss: Tensor) -> Tensor:
        """Return the loss, with an edge in its graph.

        Its backward gives the engine's parameters gradients of seed x loss, and other leaves those of the loss.
        """
        # While a graph is captured the scale may be 1 by chance. Replays with another scale need the multiplication.
        if self.seed == 1.0 and self.on_device is None:
            return loss
        return cast(Tensor, _Applied.apply(loss, loss.grad_fn, self))  # type: ignore[no-untyped-call]

    def times_seed(self, gradient: Tensor) -> Tensor:
        """Return gradient * seed, with the bits of a multiplication by a number also if the device has the seed."""
        if self.on_device is None:
            return gradient * self.seed
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return (gradient.to(wide) * self.on_device.to(wide)).to(gradient.dtype)

    def begin(self, roots: Sequence[Root], inputs: Sequence[Root] | None) -> Sequence[Root]:
        """Return the roots that a backward must begin with. See `Listener`.

        Raises StateError if only a part of the loss was passed through `scale`, and for `torch.autograd.grad` of
        parameters.
        """
        if self.seed == 1.0 or (inputs is not None and not any(id(one) in self._own for one in inputs)):
            return roots
        nodes = [root.node if isinstance(root, GradientEdge) else _node_of(root) for root in roots]
        reached = [_reached([node], self._below_outside) for node in nodes]
        reads = any(_is_leaf_of(node, self._own) for found in reached for node in found)
        given = [any(map(self._has_applied, found)) for found in reached]
        if not (reads or any(given)):  # no loss needs the factor before an output of the engine
            return roots
        if inputs is not None and reads:
            raise StateError(
                "torch.autograd.grad: expected a loss of the output of engine(...), found a loss that also reads the "
                f"engine's parameters: only a part of the gradient would have the factor {self.seed:g} of float16's "
                "loss scale (or prescale_gradients, gradient_predivide_factor); call grad() for each of the two "
                "losses"
            )
        lacking = [any(map(self._is_own, found)) for found in reached]
        if any(map(all, zip(given, lacking, strict=True))):
            raise StateError(_IN_PART)
        if any(lacks and isinstance(root, GradientEdge) for root, lacks in zip(roots, lacking, strict=True)):
            raise StateError(
                "torch.autograd.backward: expected tensors, found a GradientEdge of a loss that reads the engine's "
                "parameters beside the output of engine(...); pass the tensor"
            )
        return tuple(
            self.apply(cast(Tensor, root)) if lacks and _is_scaled(node, self._own, id(self)) else root
            for root, node, lacks in zip(roots, nodes, lacking, strict=True)
        )

    def _below_outside(self, node: Node) -> Iterable[Node | None]:
        """Return the next nodes in a backward, but none in an engine's forward or in a loss given to this engine."""
        if _edges(node):
            return [earlier for entered in _edges(node).values() for earlier in entered]
        if isinstance(node, _Edge._backward_cls) or self._has_applied(node):
            return ()
        return _below(node)

    def _is_own(self, node: Node) -> bool:
        """Return True for an output or a parameter of the engine."""
        return id(self) in _edges(node) or _is_leaf_of(node, self._own)

    def _has_applied(self, node: Node) -> bool:
        return isinstance(node, _Applied._backward_cls) and getattr(node, "scale", None) is self

    def multiplied(self, gradient: Tensor, edge: Node) -> Tensor:
        """Return the gradient of an engine's output, with the seed. Raise StateError if only a part of the loss has the
        seed.
        """
        if not self.is_given:
            self._applied_in = current_graph_task()
            return cast(Tensor, _Edge.apply(gradient, self, True))  # type: ignore[no-untyped-call]
        # This output lies below a given loss, whose multiplication at its start has reached it.
        if edge in self._given_edges:
            return gradient
        if edge in self._earlier_edges:
            return gradient * self.seed
        raise StateError(_IN_PART)

    def _begin_given(self, loss: Node | None) -> None:
        """Register hooks that divide the gradient of seed x loss at each edge to nodes outside of the engine."""
        self._applied_in = current_graph_task()
        if not self.is_given:  # an error may have ended the last given backward without `_end_given`
            self._forget_given()
        ways = _ways_out(loss, self._own, self)  # before the first hook changes the graph
        if self.on_device is not None and (ways.out or ways.back):
            raise ValueError(
                "compile.graphs: expected a loss that depends on the engine's parameters alone, found a loss that also "
                "reaches parameters outside; the step divides their gradients by the loss scale. Leave "
                "compile.graphs out"
            )
        self._given_edges |= ways.edges
        self._earlier_edges |= ways.earlier_edges
        for nodes, factor in ((ways.out, 1.0 / self.seed), (ways.back, self.seed)):
            for node, indices in nodes.items():
                if (node, factor) not in self._factors:  # else another loss of the same backward has hooked it
                    self._factors[node, factor] = _multiplied(node, indices, factor)
        # Autograd alone holds the GraphTask, until this backward ends: then the reference is dead, after an error too.
        if not self.is_given:
            self._given = weakref.ref(GraphTask(self._end_given))

    def _end_given(self) -> None:
        for handle in self._factors.values():
            handle.remove()
        self._forget_given()

    def _forget_given(self) -> None:
        self._factors, self._given_edges, self._earlier_edges = {}, set(), set()


class LossScaleUpdate(StepFeature):
    """Lets float16's dynamic loss scale follow the overflows. Raises LossScaleError as `LossScaler.update`."""

    def __init__(self, loss_scaler: LossScaler) -> None:
        self._loss_scaler = loss_scaler

    @classmethod
    def of(cls, parts: Any) -> Self | None:
        return cls(parts.steps.scale.loss_scaler) if parts.config.fp16.enabled else None

    def after_step(self, step: int, result: StepResult) -> None:
        self._loss_scaler.update(result.skipped)


def hook_output(output: Any, hook: Callable[[Tensor], Tensor], hook_of_tiled: Callable[[Tensor], Tensor]) -> None:
    """Change the gradient of each tensor in a forward's output by `hook`.

    hook_of_tiled: for the hidden values of tiled logits. The loss of these also reads the weight of the head.
    """

    def hooked(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ChunkedLogits):
            tensor.hidden.register_hook(hook_of_tiled)  # type: ignore[no-untyped-call]
        elif tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    replace_tensors(output, hooked)


class _Edge(torch.autograd.Function):
    """Multiplies or divides a gradient that enters or leaves the engine's part of the graph.

    A second backward (create_graph) has the opposite direction, so the seed is also applied or removed in it.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, scale: GradientScale, enters: bool) -> Tensor:
        ctx.scale, ctx.enters = scale, enters
        return gradient * scale.seed if enters else gradient / scale.seed

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.scale.is_given:
            ctx.scale._applied_in = current_graph_task()
            return second, None, None
        return second * ctx.scale.seed if ctx.enters else second / ctx.scale.seed, None, None


class _Outside(torch.autograd.Function):
    """Marks an output of the engine. torch refuses a change in place, as it would bypass the mark.

    A loss, (), becomes a separate tensor instead: loops that weigh it write `loss *= weight`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor) if tensor.dim() else tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.scale.multiplied(gradient, ctx), None


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, node: Node | None, scale: GradientScale) -> Tensor:
        ctx.node, ctx.scale = node, scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.scale._begin_given(ctx.node)
        return ctx.scale.times_seed(gradient), None, None


def _fixed_part(config: Config, data_size: int) -> float:
    """Return the seed without the loss scale."""
    accumulation = config.gradient_accumulation_steps or 1
    before_sum = 1.0 / (data_size if config.prescale_gradients else config.gradient_predivide_factor)
    if config.fp16.enabled:
        return before_sum / accumulation
    if "fp16" in (config.communication_data_type, config.data_types.grad_accum_dtype):
        # Without a loss scale nothing shrinks after an overflow of a float16 sum, so its terms must be small.
        return (before_sum if before_sum != 1.0 else 1.0 / data_size) / accumulation
    return before_sum


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # torch declares a method, but it is an attribute
    return cast(dict[str, Any], found)


def _edges(node: Node) -> dict[int, Sequence[Node]]:
    """Return id of an engine -> the nodes of its forward's inputs, if the node is an output of engines."""
    return cast(dict[int, Sequence[Node]], _metadata(node).get(_EDGE, {}))


class _Ways(NamedTuple):
    """The edges in the backward of a given loss between nodes with its factor and nodes without it.

    Each entry is a node, with the indices of its inputs beyond the edge. Nodes before the engine may also reach the
    loss past the engine.
    """

    out: dict[Node, list[int]]  # to leaves, to the graph before the engine, to other engines
    back: dict[Node, list[int]]  # from the graph before the engine to its parameters
    edges: set[Node]  # outputs of the engine with the factor
    earlier_edges: set[Node]  # outputs without it


def _ways_out(loss: Node | None, own: Collection[int], scale: GradientScale) -> _Ways:
    """Find all edges of a given loss. own: ids of the engine's parameters. scale: of the engine."""
    entered: list[Node] = []
    engine = id(scale)  # its key among `_edges`
    if loss is not None and _is_of_another(loss, engine):
        raise StateError(
            "engine.backward(loss): expected a loss of this engine, found the output of another engine; call the "
            "backward of that engine, or loss.backward()"
        )

    def below_outside(node: Node) -> Iterable[Node | None]:
        entered.extend(chain(*_edges(node).values()))  # past another engine, this engine may come again
        return () if _edges(node) else _below(node)

    outside = _reached([loss], below_outside)
    if any(scale._has_applied(node) for node in outside):
        raise StateError(
            "engine.backward(loss): expected a loss without engine.scale(), found a loss with it: call either "
            "engine.backward(loss) or engine.scale(loss).backward()"
        )
    before = _reached(entered, scale._below_outside)

    def is_out(node: Node) -> bool:
        return node in before or _is_other_leaf(node, own) or _is_of_another(node, engine)

    return _Ways(
        _ways(outside - before, is_out),
        _ways(before, lambda node: _is_leaf_of(node, own)),
        {node for node in outside - before if engine in _edges(node)},
        {node for node in before if engine in _edges(node)},
    )


def _ways(nodes: Iterable[Node], is_beyond: Callable[[Node], bool]) -> dict[Node, list[int]]:
    """Return the nodes that are no outputs of engines, with the indices of their inputs beyond the edge."""
    found = {
        node: [index for index, (other, _) in enumerate(node.next_functions) if other is not None and is_beyond(other)]
        for node in nodes
        if not _edges(node)
    }
    return {node: indices for node, indices in found.items() if indices}


def _is_of_another(node: Node, engine: int) -> bool:
    edges = _edges(node)
    return bool(edges) and engine not in edges


def _is_other_leaf(node: Node, own: Collection[int]) -> bool:
    leaf = getattr(node, "variable", None)
    return leaf is not None and id(leaf) not in own


def _is_leaf_of(node: Node, own: Collection[int]) -> bool:
    leaf = getattr(node, "variable", None)
    return leaf is not None and id(leaf) in own


def _is_scaled(root: Node | None, own: Collection[int], engine: int) -> bool:
    """Return True if a backward from this node is multiplied at its start, not at an output of an engine."""
    return root is not None and not _is_other_leaf(root, own) and not _is_of_another(root, engine)


def _node_of(root: Tensor) -> Node | None:
    return get_gradient_edge(root).node if root.requires_grad else None


def _below(node: Node) -> Iterable[Node | None]:
    return [other for other, _ in node.next_functions]


def _reached(starts: Iterable[Node | None], below: Callable[[Node], Iterable[Node | None]] = _below) -> set[Node]:
    """Return the nodes and all nodes below them."""
    # A loop and no recursion: graphs are deeper than Python's stack.
    found, waiting = set[Node](), list(starts)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(below(node))
    return found


def _multiplied(node: Node, indices: Collection[int], factor: float) -> RemovableHandle:
    """Multiply the gradients that a node gives to some of its inputs."""

    def hook(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(g * factor if g is not None and index in indices else g for index, g in enumerate(gradients))

    handle: RemovableHandle = node.register_hook(hook)
    return handle
