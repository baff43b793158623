"""The factors between the gradient of a loss and the mean gradient of a step, and who sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..parallel.tiled_logits import TiledLogits
from ..zero.graph_task import GraphTask, current_graph_task
from ..zero.loss_scale import LossScaler
from ..zero.sequence import StateError
from .batch import replace_tensors
from .config.config import Config

_EDGE = "lowtide: edge of the engine"  # a key in the metadata of nodes of the graph


class GradientScale:
    """Makes the mean over microbatches and data-parallel ranks of sums over them.

        loss --- x seed ---> param.grad --- summed ---> shard --- x rest ---> update

    The update multiplies by `rest` in the pass that it makes anyway. The seed is 1, so that everything in the graph has
    the gradient of the loss as it was passed: inputs of the engine and what has made them too. It is not where
    float16 would lose gradients without it, or where the config asks for it. Where the loss was given (`apply`), all of
    the graph gets it, and leaves that are not the engine's, and what lies before it, get their gradients divided (hooks
    between output and loss see them before that). Else what the engine has returned gets it:

        other parameters -> input |edge  engine's forward  edge| output -> other parameters -> loss
                  divided here ----^        multiplied here ----^              or there ----^  and divided on the way
    """

    def __init__(self, config: Config, data_size: int, loss_scaler: LossScaler, own: Iterable[nn.Parameter]) -> None:
        """data_size: the number of data-parallel ranks. own: the engine's parameters."""
        self._num_summed = data_size * (config.gradient_accumulation_steps or 1)
        self.loss_scaler = loss_scaler
        self._fixed = _fixed_part(config, data_size)
        self._own = frozenset(map(id, own))
        self._entered: list[Node] = []  # what the inputs of the forward that runs were made by
        self._given: weakref.ref[GraphTask] | None = None  # a backward whose loss was multiplied
        self._divisions: dict[Node, RemovableHandle] = {}  # in that backward
        self._given_edges: set[Node] = set()  # of what it has returned: where such a backward comes to it
        self._applied_in = -1  # the last run of autograd in which it was, in one way or the other

    @property
    def seed(self) -> float:
        """What the backward of this microbatch begins with."""
        return self.loss_scaler.scale * self._fixed

    @property
    def rest(self) -> float:
        """What is left to multiply the sum of the step's gradients by."""
        return 1.0 / (self._num_summed * self.seed)

    @property
    def is_given(self) -> bool:
        """Whether the backward that runs began with a loss that was multiplied."""
        return self._given is not None and self._given() is not None

    def mark_input(self, tensor: Tensor) -> Tensor:
        """An input of the engine as its forward is to see it."""
        if self.seed == 1.0 or not tensor.requires_grad or not torch.is_grad_enabled():
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
            if isinstance(tensor, TiledLogits):
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

    def multiplied(self, gradient: Tensor, edge: Node) -> Tensor:
        """A gradient that comes to what the engine has returned. Raises StateError where it lacks what others have."""
        if not self.is_given:
            self._applied_in = current_graph_task()
            return cast(Tensor, _Edge.apply(gradient, self, True))  # type: ignore[no-untyped-call]
        if edge not in self._given_edges:
            raise StateError(
                "backward: expected all of the loss through engine.scale(), found a part of it past that, as in "
                "(engine.scale(a) + b).backward(): call engine.scale(a + b).backward(), or (a + b).backward()"
            )
        return gradient

    def _begin_given(self, loss: Node | None) -> None:
        """Where the gradient of seed x loss goes over to what is not the engine's, it is divided."""
        self._applied_in = current_graph_task()
        if not self.is_given:
            self._divisions, self._given_edges = {}, set()
        ways, edges = _ways_out(loss, self._own, self)  # all are found before the first hook
        self._given_edges |= edges
        for node, indices in ways:
            if node not in self._divisions:  # another loss of the same backward has come to it
                self._divisions[node] = _divided(node, indices, self.seed)
        if not self.is_given:
            self._given = weakref.ref(GraphTask(self._end_given))

    def _end_given(self) -> None:
        for handle in self._divisions.values():
            handle.remove()
        self._divisions, self._given_edges = {}, set()


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
    """What the engine returns, as its caller sees it. A change in place would go past it; torch refuses that."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

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


def _ways_out(
    loss: Node | None, own: Collection[int], scale: GradientScale
) -> tuple[list[tuple[Node, list[int]]], set[Node]]:
    """Nodes between the loss and the engine, with those of their inputs that are leaves, come from before the engine,
    or are made by another engine, which has factors of its own; and those that the engine has returned.

    own: identities of the engine's parameters. scale: that of the engine. What is before the engine may reach the
    loss past it as well.
    """
    entered: list[Node] = []
    engine = id(scale)  # its key among `_edges`
    if loss is not None and _is_of_another(loss, engine):
        raise StateError(
            "engine.backward(loss): expected a loss that this engine has computed, found the output of another engine; "
            "call the backward of that one, or loss.backward()"
        )

    def below_outside(node: Node) -> bool:
        entered.extend(_edges(node).get(engine, ()))
        return not _edges(node)

    outside = _reached([loss], below_outside)
    if any(isinstance(node, _Applied._backward_cls) and getattr(node, "scale", None) is scale for node in outside):
        raise StateError(
            "engine.backward(loss): expected a loss that has not been through engine.scale(), found one that has: call "
            "engine.backward(loss), or engine.scale(loss).backward()"
        )
    before = _reached(entered)
    found = []
    for node in outside - before:
        ways = [
            index
            for index, (other, _) in enumerate(node.next_functions)
            if other is not None and (other in before or _is_other_leaf(other, own) or _is_of_another(other, engine))
        ]
        if ways and not _edges(node):
            found.append((node, ways))
    return found, {node for node in outside if engine in _edges(node)}


def _is_of_another(node: Node, engine: int) -> bool:
    edges = _edges(node)
    return bool(edges) and engine not in edges


def _is_other_leaf(node: Node, own: Collection[int]) -> bool:
    leaf = getattr(node, "variable", None)
    return leaf is not None and id(leaf) not in own


def _reached(starts: Iterable[Node | None], goes_on: Callable[[Node], bool] = lambda node: True) -> set[Node]:
    """The nodes, and all below them; below a node only where `goes_on` says so."""
    found, waiting = set[Node](), list(starts)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            if goes_on(node):
                waiting.extend(other for other, _ in node.next_functions)
    return found


def _divided(node: Node, indices: Collection[int], seed: float) -> RemovableHandle:
    """Divides the gradients that a node gives to some of its inputs."""

    def hook(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(g / seed if g is not None and index in indices else g for index, g in enumerate(gradients))

    handle: RemovableHandle = node.register_hook(hook)
    return handle
