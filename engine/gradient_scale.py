"""The factors between the gradient of a loss and the mean gradient of a step, and who sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..zero.hooks import tensors_in
from ..zero.loss_scale import LossScaler
from .config.config import Config

_EDGE = "lowtide: edge of the engine"  # a key in the metadata of nodes of the graph


class GradientScale:
    """Makes the mean over microbatches and data-parallel ranks of sums over them.

        loss --- x seed ---> param.grad --- summed ---> shard --- x rest ---> update

    The update multiplies by `rest` in the pass that it makes anyway. The seed is 1, so that everything in the graph has
    the gradient of the loss as it was passed: inputs of the engine and what has made them too. It is not where
    float16 would lose gradients without it, or where the config asks for it; then leaves that are not the engine's, and
    what lies before it, get their gradients divided by the seed (hooks between output and loss see them before that):

        other parameters -> input |edge  engine's forward  edge| output -> other parameters -> loss
                  divided here ----^                                  ^---- divided on the way to each
    """

    def __init__(self, config: Config, data_size: int, loss_scaler: LossScaler, own: Iterable[nn.Parameter]) -> None:
        """data_size: the number of data-parallel ranks. own: the engine's parameters."""
        self._num_summed = data_size * (config.gradient_accumulation_steps or 1)
        self.loss_scaler = loss_scaler
        self._fixed = _fixed_part(config, data_size)
        self._own = frozenset(map(id, own))
        self._entered: list[Node] = []  # what the inputs of the forward that runs were made by

    @property
    def seed(self) -> float:
        """What the backward of this microbatch begins with."""
        return self.loss_scaler.scale * self._fixed

    @property
    def rest(self) -> float:
        """What is left to multiply the sum of the step's gradients by."""
        return 1.0 / (self._num_summed * self.seed)

    def mark_input(self, tensor: Tensor) -> Tensor:
        """An input of the engine as its forward is to see it."""
        if self.seed == 1.0 or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        inside = tensor.view_as(tensor)
        inside.register_hook(lambda gradient: gradient / self.seed)  # type: ignore[no-untyped-call]
        self._entered.append(get_gradient_edge(tensor).node)
        return inside

    def mark_output(self, output: object) -> None:
        """The forward has ended with this output."""
        if self.seed != 1.0:
            entered, self._entered = tuple(self._entered), []
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[_EDGE] = entered

    def backward(self, loss: Tensor) -> None:
        """Gradients of seed x loss for the engine's parameters, and of the loss for all others."""
        if self.seed == 1.0:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        with self._others_divided(loss):
            (loss * self.seed).backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def _others_divided(self, loss: Tensor) -> Iterator[None]:
        """Where the gradient of seed x loss goes over to what is not the engine's, it is divided."""
        handles = [
            _divided(node, indices, self.seed)
            for node, indices in _ways_out(loss, self._own)  # all are found before the first hook
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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


def _ways_out(loss: Tensor, own: Collection[int]) -> list[tuple[Node, list[int]]]:
    """Nodes between the loss and the engine, with those of their inputs that are leaves or come from before the engine.

    own: identities of the engine's parameters. What is before the engine may reach the loss past it as well.
    """
    entered: list[Node] = []

    def below_outside(node: Node) -> bool:
        entered.extend(_metadata(node).get(_EDGE, ()))
        return _EDGE not in _metadata(node)

    outside = _reached([loss.grad_fn], below_outside)
    before = _reached(entered)
    found = []
    for node in outside - before:
        ways = [
            index
            for index, (other, _) in enumerate(node.next_functions)
            if other is not None and (other in before or _is_other_leaf(other, own))
        ]
        if ways and _EDGE not in _metadata(node):
            found.append((node, ways))
    return found


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
