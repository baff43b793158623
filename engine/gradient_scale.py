"""The factors between the gradient of a loss and the mean gradient of a step, and who sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
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
    float16 would lose gradients without it, or where the config asks for it; what is not a parameter of the engine
    gets its gradient divided by the seed then:

        other parameters -> input |edge  engine's forward  edge| output -> other parameters -> loss
                  divided here ----^                                  ^---- each divided by itself
    """

    def __init__(self, config: Config, data_size: int, scaler: LossScaler, own: Iterable[nn.Parameter]) -> None:
        """data_size: the number of data-parallel ranks. own: the engine's parameters."""
        self._num_summed = data_size * (config.gradient_accumulation_steps or 1)
        self._scaler = scaler
        self._fixed = _fixed_part(config, data_size)
        self._own = frozenset(map(id, own))

    @property
    def seed(self) -> float:
        """What the backward of this microbatch begins with."""
        return self._scaler.scale * self._fixed

    @property
    def rest(self) -> float:
        """What is left to multiply the sum of the step's gradients by."""
        return 1.0 / (self._num_summed * self.seed)

    def enter(self, tensor: Tensor) -> Tensor:
        """An input of the engine as its forward is to see it."""
        if self.seed == 1.0 or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        inside = tensor.view_as(tensor)
        _mark(inside)
        inside.register_hook(lambda gradient: gradient / self.seed)  # type: ignore[no-untyped-call]
        return inside

    def leave(self, output: object) -> None:
        """The forward has ended with this output."""
        if self.seed != 1.0:
            for tensor in tensors_in(output):
                _mark(tensor)

    def backward(self, loss: Tensor) -> None:
        """Gradients of seed x loss for the engine's parameters, and of the loss for all others."""
        if self.seed == 1.0:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        with self._others_divided(loss):
            (loss * self.seed).backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def _others_divided(self, loss: Tensor) -> Iterator[None]:
        outside = (node for node, leaf in _leaves_outside(loss) if id(leaf) not in self._own)
        handles = [_divided(node, self.seed) for node in outside]
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


def _mark(tensor: Tensor) -> None:
    if tensor.grad_fn is not None:
        _metadata(tensor.grad_fn)[_EDGE] = True


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # an attribute, though torch declares a method
    return cast(dict[str, Any], found)


def _leaves_outside(loss: Tensor) -> Iterator[tuple[Node, Tensor]]:
    """The leaves between the loss and the edges of the engine, with the nodes that take up their gradients."""
    found, waiting = set[Node](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or _EDGE in _metadata(node):
            continue
        found.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield node, leaf
        waiting.extend(below for below, _ in node.next_functions)


def _divided(node: Node, seed: float) -> RemovableHandle:
    handle: RemovableHandle = node.register_prehook(
        lambda gradients: tuple(g if g is None else g / seed for g in gradients)
    )
    return handle
