"""Backward of a pipeline stage: gradients of the received tensors (`Entry`) and of the weights (`WeightGradients`).

The previous stage waits for dx alone. So the linear layers of a stage compute dx in I, and keep x and dy for the
gradients of their parameters in W. Other parameters (norms, embeddings, convolutions) get their gradients in I,
because these are cheap. Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.linear_layers import LinearLayers, gradient_of
from ..model.patches import ModelPatches
from .split.carried import Carried


class Entry:
    """Start of a stage's autograd graph for a microbatch; collects the gradients of the received tensors.

    The first node of the graph stores gradients and no values. A leaf tensor would hold its values until backward,
    even if the stage has not saved them, or has offloaded them.
    """

    def __init__(self, received: Carried) -> None:
        self._spec = received.spec
        self._device = received.tensors[0].device if received.tensors else torch.device("cpu")
        self._found: list[Tensor | None] = []

    def opened(self, received: Carried) -> Carried:
        """Return the same values as outputs of the graph's first node."""
        needs = self._spec.needs_grad
        values = [tensor for tensor, needed in zip(received.tensors, needs, strict=True) if needed]
        if not values:
            return received
        # autograd makes a node only if an input requires a gradient.
        anchor = torch.empty((), device=self._device, requires_grad=True)
        given = iter(_Begin.apply(anchor, self._found, values))  # type: ignore[no-untyped-call]
        tensors = (next(given) if needed else tensor for tensor, needed in zip(received.tensors, needs, strict=True))
        return Carried(tuple(tensors), self._spec)

    def gradients(self) -> list[Tensor]:
        """Return a gradient for each tensor that needs a gradient: zeros for a tensor that the stage did not use."""
        shapes = [shape for shape, needed in zip(self._spec.tensors, self._spec.needs_grad, strict=True) if needed]
        # Empty if the stage used none of the tensors, so that backward did not reach the node.
        found = self._found or [None] * len(shapes)
        return [
            torch.zeros(shape.shape, dtype=shape.dtype, device=self._device) if gradient is None else gradient
            for shape, gradient in zip(shapes, found, strict=True)
        ]


class _Begin(torch.autograd.Function):
    """Make the values outputs of a node that does not save them: autograd does not look into a list of inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: list[Tensor | None], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.found = found
        # `Entry.gradients` makes zeros, and only after the backward has freed its memory.
        ctx.set_materialize_grads(False)
        # New tensors: autograd would make the received tensors themselves outputs of this node.
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.found[:] = gradients
        return None, None, None


_Products = tuple[nn.Parameter, Tensor, Tensor | None, bool]
"""(weight, dy, x, is_transposed) of a weight, (bias, dy, None, False) of a bias: arguments of `MakeGradient`."""


class WeightGradients:
    """Delays the weight gradients of a stage's linear layers from I to W."""

    def __init__(self, modules: Iterable[nn.Module], patches: ModelPatches) -> None:
        """modules: those of the stage."""
        self._delayed: dict[int, list[_Products]] = {}  # by microbatch
        self._open: list[_Products] | None = None  # of the microbatch whose I runs now
        LinearLayers(modules, self._put, patches)

    @contextmanager
    def put_off(self, microbatch: int) -> Iterator[None]:
        """Within the context, delay the weight gradients of backward until `make(microbatch)`."""
        self._open = self._delayed.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def make(self, microbatch: int) -> None:
        """Add the delayed gradients of a microbatch to `param.grad`."""
        for param, dy, x, is_transposed in self._delayed.pop(microbatch, []):
            gradient = gradient_of(dy, x, is_transposed)
            if param.grad is None:
                param.grad = gradient.to(param.dtype)
            else:
                param.grad += gradient

    def forget(self) -> None:
        """Drop all delayed gradients, after an error."""
        self._delayed.clear()

    def _put(self, param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor | None:
        """Return the gradient, or keep its factors for W and return None."""
        # A hook must see the gradient in this backward, for example to sum it over ranks.
        if self._open is None or param._backward_hooks or param._post_accumulate_grad_hooks:
            return gradient_of(dy, x, is_transposed)
        # Detached: until W, the graph of x would hold the tensors that the stage received.
        self._open.append((param, dy, None if x is None else x.detach(), is_transposed))
        return None
