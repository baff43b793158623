"""The factors between the gradient of a loss and the mean gradient of a step, and who sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

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

Root = Tensor | GradientEdge
Listener = Callable[[Sequence[Root], Sequence[Root] | None], Sequence[Root]]
"""Is given what a backward begins with, and the inputs of a `torch.autograd.grad` (None: of a backward, which adds to
`grad`). Returns what it is to begin with instead."""

_NAME = "_engine_run_backward"  # what torch.autograd.backward and torch.autograd.grad call; Tensor.backward calls those


def on_backward_start(listener: Listener) -> Callable[[], None]:
    """Has a bound method told of each backward that is not a part of another one. Returns what ends that.

    The object of the method is not held. torch has no hook at this place, so its function is replaced, as long as
    somebody listens.
    """
    starts = vars(torch.autograd)[_NAME]
    if not isinstance(starts, _Starts):
        starts = vars(torch.autograd)[_NAME] = _Starts(starts)
    reference = weakref.WeakMethod(listener)
    starts.listeners.append(reference)

    def end() -> None:
        starts.listeners.remove(reference)
        if not starts.listeners and vars(torch.autograd)[_NAME] is starts:
            vars(torch.autograd)[_NAME] = starts.run

    return end


class _Starts:
    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.listeners: list[weakref.WeakMethod[Listener]] = []

    def __call__(self, roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
        if current_graph_task() < 0:
            inputs = None if kwargs["accumulate_grad"] else args[3]
            for reference in list(self.listeners):
                listener = reference()
                if listener is not None:
                    roots = listener(roots, inputs)
        return self.run(roots, *args, **kwargs)


_IN_PART = (
    "backward: expected all of the loss through engine.scale(), found a part of it past that, as in "
    "(engine.scale(a) + b).backward(): call engine.scale(a + b).backward(), or (a + b).backward()"
)
_EDGE = "lowtide: edge of the engine"  # a key in the metadata of nodes of the graph


class GradientScale:
    """Makes the mean over microbatches and data-parallel ranks of sums over them.

        loss --- x seed ---> param.grad --- summed ---> shard --- x rest ---> update

    The update multiplies by `grad_scale` in the pass that it makes anyway. The seed is 1, so that everything in the
    graph has
    the gradient of the loss as it was passed: inputs of the engine and what has made them too. It is not where
    float16 would lose gradients without it, or where the config asks for it. Where the loss was given (`apply`), all of
    the graph gets it, and leaves that are not the engine's, and what lies before it, get their gradients divided (hooks
    between output and loss see them before that). Else what the engine has returned gets it:

        other parameters -> input |edge  engine's forward  edge| output -> other parameters -> loss
                  divided here ----^        multiplied here ----^              or there ----^  and divided on the way

    A loss that comes to the engine's parameters past what it has returned (a weight in a penalty, a part of the model
    that was called by itself, a loss that a block keeps) is taken for a given one when its backward begins (`begin`).
    """

    def __init__(self, config: Config, data_size: int, loss_scaler: LossScaler, own: Iterable[nn.Parameter]) -> None:
        """data_size: the number of data-parallel ranks. own: the engine's parameters."""
        is_mean = config.gradient_allreduce_op == "mean"
        self._num_summed = (data_size if is_mean else 1) * (config.gradient_accumulation_steps or 1)
        self.loss_scaler = loss_scaler
        self._fixed = _fixed_part(config, data_size)
        self._own = frozenset(map(id, own))
        self._entered: list[Node] = []  # what the inputs of the forward that runs were made by
        self._given: weakref.ref[GraphTask] | None = None  # a backward whose loss was multiplied
        self._factors: dict[tuple[Node, float], RemovableHandle] = {}  # on the way, in that backward
        self._given_edges: set[Node] = set()  # of what it has returned: where such a backward comes to it
        self._earlier_edges: set[Node] = set()  # those before another forward: where gradients were divided again
        self._applied_in = -1  # the last run of autograd in which it was, in one way or the other

    @property
    def seed(self) -> float:
        """What the backward of this microbatch begins with."""
        return self.loss_scaler.scale * self._fixed

    @property
    def grad_scale(self) -> float:
        """What is left to multiply the sum of the step's gradients by."""
        return 1.0 / (self._num_summed * self.seed)

    @property
    def is_given(self) -> bool:
        """Whether the backward that runs began with a loss that was multiplied."""
        return self._given is not None and self._given() is not None

    def mark_input(self, tensor: Tensor) -> Tensor:
        """An input of the engine that requires a gradient, as its forward is to see it."""
        if self.seed == 1.0 or not torch.is_grad_enabled():
            return tensor
        inside = tensor.view_as(tensor)
        inside.register_hook(lambda gradient: _Edge.apply(gradient, self, False))  # type: ignore[no-untyped-call]
        self._entered.append(get_gradient_edge(tensor).node)
        return inside

    def mark_output(self, output: Any) -> Any:
        """The output of a forward as the caller is to see it."""
        if self.seed == 1.0:
            return output
        entered, self._entered = tuple(self._entered), []

        def marked(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ChunkedLogits):
                return tensor.mapped(made_outside)  # a loss of them has the graph of what they are computed from
            return tensor if tensor.grad_fn is None else made_outside(tensor)

        def made_outside(tensor: Tensor) -> Tensor:
            # Of its own, since a loss and its logits may both be returned.
            outside = cast(Tensor, _Outside.apply(tensor, self))  # type: ignore[no-untyped-call]
            assert outside.grad_fn is not None
            _metadata(outside.grad_fn)[_EDGE] = {id(self): entered}
            return outside

        return replace_tensors(output, marked)

    def check_applied(self) -> None:
        """Raises StateError where gradients have come without the seed in the run of autograd that ends."""
        if self.seed != 1.0 and self._applied_in != current_graph_task():
            raise StateError(
                f"loss.backward(): expected a graph that begins with what engine(...) has returned, where the factor "
                f"{self.seed:g} of float16's loss scale (or prescale_gradients, gradient_predivide_factor) is applied; "
                "found one past it: call engine(...) for the forward, or `engine.scale(loss).backward()`"
            )

    def apply(self, loss: Tensor) -> Tensor:
        """The loss; its backward gives gradients of seed x loss to the engine's parameters, of the loss to others."""
        return loss if self.seed == 1.0 else cast(Tensor, _Applied.apply(loss, loss.grad_fn, self))  # type: ignore[no-untyped-call]

    def begin(self, roots: Sequence[Root], inputs: Sequence[Root] | None) -> Sequence[Root]:
        """What a backward is to begin with; see `Listener`.

        Raises StateError where only a part of it was through `scale`, and for a `torch.autograd.grad` of parameters.
        """
        if self.seed == 1.0 or (inputs is not None and not any(id(one) in self._own for one in inputs)):
            return roots
        nodes = [root.node if isinstance(root, GradientEdge) else _node_of(root) for root in roots]
        reached = _reached(nodes, self._below_outside)
        if not any(_is_leaf_of(node, self._own) for node in reached):
            return roots
        if inputs is not None:
            raise StateError(
                "torch.autograd.grad: expected a loss of what engine(...) has returned, found one that reads the "
                f"engine's parameters beside it: of the gradient that is asked for a part would have the factor "
                f"{self.seed:g} of float16's loss scale (or prescale_gradients, gradient_predivide_factor), and "
                "a part not; give grad() the two losses one after the other"
            )
        if any(self._has_applied(node) for node in reached):
            raise StateError(_IN_PART)
        if not all(isinstance(root, Tensor) for root in roots):
            raise StateError(
                "torch.autograd.backward: expected tensors, found a GradientEdge, of a loss that reads the engine's "
                "parameters beside what engine(...) has returned; give it the tensor"
            )
        return tuple(
            self.apply(cast(Tensor, root)) if _is_scaled(node, self._own, id(self)) else root
            for root, node in zip(roots, nodes, strict=True)
        )

    def _below_outside(self, node: Node) -> Iterable[Node | None]:
        """What comes after a node in a backward, but for what lies in a forward of an engine, or was given to this."""
        if _edges(node):
            return [earlier for entered in _edges(node).values() for earlier in entered]
        if isinstance(node, _Edge._backward_cls) or self._has_applied(node):
            return ()
        return _below(node)

    def _has_applied(self, node: Node) -> bool:
        return isinstance(node, _Applied._backward_cls) and getattr(node, "scale", None) is self

    def multiplied(self, gradient: Tensor, edge: Node) -> Tensor:
        """A gradient that comes to what the engine has returned. Raises StateError where it lacks what others have."""
        if not self.is_given:
            self._applied_in = current_graph_task()
            return cast(Tensor, _Edge.apply(gradient, self, True))  # type: ignore[no-untyped-call]
        if edge in self._given_edges:
            return gradient
        if edge in self._earlier_edges:
            return gradient * self.seed
        raise StateError(_IN_PART)

    def _begin_given(self, loss: Node | None) -> None:
        """Where the gradient of seed x loss goes over to what is not the engine's, it is divided."""
        self._applied_in = current_graph_task()
        if not self.is_given:
            self._forget_given()
        ways = _ways_out(loss, self._own, self)  # all are found before the first hook
        self._given_edges |= ways.edges
        self._earlier_edges |= ways.earlier_edges
        for nodes, factor in ((ways.out, 1.0 / self.seed), (ways.back, self.seed)):
            for node, indices in nodes.items():
                if (node, factor) not in self._factors:  # another loss of the same backward has come to it
                    self._factors[node, factor] = _multiplied(node, indices, factor)
        if not self.is_given:
            self._given = weakref.ref(GraphTask(self._end_given))

    def _end_given(self) -> None:
        for handle in self._factors.values():
            handle.remove()
        self._forget_given()

    def _forget_given(self) -> None:
        self._factors, self._given_edges, self._earlier_edges = {}, set(), set()


def hook_output(output: Any, hook: Callable[[Tensor], Tensor], hook_of_tiled: Callable[[Tensor], Tensor]) -> None:
    """Has the gradient of each tensor in the output of a forward changed by `hook` on its way.

    hook_of_tiled: of the hidden values of tiled logits, beside which a loss of them reads the head's weight.
    """

    def hooked(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ChunkedLogits):
            tensor.hidden.register_hook(hook_of_tiled)  # type: ignore[no-untyped-call]
        elif tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    replace_tensors(output, hooked)


class _Edge(torch.autograd.Function):
    """Where a gradient enters the engine's part of the graph, or leaves it.

    What a first derivative (create_graph) has given to the outside is entered by the second one, and the other way
    round: it takes or gives the seed there, beside the factor that it goes through in any case.
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
    """What the engine returns, as its caller sees it. A change in place would go past it; torch refuses that.

    Not of a loss, (), which is a tensor of its own: loops that weigh it write `loss *= weight`.
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
        return gradient * ctx.scale.seed, None, None


def _fixed_part(config: Config, data_size: int) -> float:
    """The seed, but for the loss scale."""
    accumulation = config.gradient_accumulation_steps or 1
    before_sum = 1.0 / (data_size if config.prescale_gradients else config.gradient_predivide_factor)
    if config.fp16.enabled:
        return before_sum / accumulation
    if "fp16" in (config.communication_data_type, config.data_types.grad_accum_dtype):
        # No loss scale comes down where a sum is beyond float16: what is summed is small from the start.
        return (before_sum if before_sum != 1.0 else 1.0 / data_size) / accumulation
    return before_sum


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # an attribute, though torch declares a method
    return cast(dict[str, Any], found)


def _edges(node: Node) -> dict[int, Sequence[Node]]:
    """Of which engines' outputs a node of the graph makes one -> what their inputs were made by."""
    return cast(dict[int, Sequence[Node]], _metadata(node).get(_EDGE, {}))


class _Ways(NamedTuple):
    """Where the backward of a given loss goes over from what has its factor to what has not, and the other way.

    Nodes, with those of their inputs that lie on the other side. What is before the engine may reach the loss past it
    as well.
    """

    out: dict[Node, list[int]]  # to leaves, to what comes from before the engine, to engines with factors of their own
    back: dict[Node, list[int]]  # from before the engine to its parameters
    edges: set[Node]  # of what the engine has returned, with the factor
    earlier_edges: set[Node]  # without it


def _ways_out(loss: Node | None, own: Collection[int], scale: GradientScale) -> _Ways:
    """own: identities of the engine's parameters. scale: that of the engine."""
    entered: list[Node] = []
    engine = id(scale)  # its key among `_edges`
    if loss is not None and _is_of_another(loss, engine):
        raise StateError(
            "engine.backward(loss): expected a loss that this engine has computed, found the output of another engine; "
            "call the backward of that one, or loss.backward()"
        )

    def below_outside(node: Node) -> Iterable[Node | None]:
        entered.extend(_edges(node).get(engine, ()))
        return () if _edges(node) else _below(node)

    outside = _reached([loss], below_outside)
    if any(scale._has_applied(node) for node in outside):
        raise StateError(
            "engine.backward(loss): expected a loss that has not been through engine.scale(), found one that has: call "
            "engine.backward(loss), or engine.scale(loss).backward()"
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
    """Those of the nodes that are no edges, with the places of their inputs that are beyond."""
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
    """Whether what a backward begins with gets the factor there, and not where it comes to an engine's edge."""
    return root is not None and not _is_other_leaf(root, own) and not _is_of_another(root, engine)


def _node_of(root: Tensor) -> Node | None:
    return get_gradient_edge(root).node if root.requires_grad else None


def _below(node: Node) -> Iterable[Node | None]:
    return [other for other, _ in node.next_functions]


def _reached(starts: Iterable[Node | None], below: Callable[[Node], Iterable[Node | None]] = _below) -> set[Node]:
    """The nodes, and all that is below them, as `below` says."""
    found, waiting = set[Node](), list(starts)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(below(node))
    return found


def _multiplied(node: Node, indices: Collection[int], factor: float) -> RemovableHandle:
    """Multiplies the gradients that a node gives to some of its inputs."""

    def hook(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(g * factor if g is not None and index in indices else g for index, g in enumerate(gradients))

    handle: RemovableHandle = node.register_hook(hook)
    return handle
