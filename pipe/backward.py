"""The backward of a stage: the gradients of what it has received, and those of its weights, now or later.

The stage before waits for dx alone, so the linear layers of a stage give it at once (I), and keep x and dy until there
is time for the gradients of their parameters (W). Other parameters (norms, embeddings, convolutions) get their
gradients in I: they cost little.
Source: zero bubble pipeline parallelism, arXiv 2401.10241, section 2.
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
    """What a stage has received for a microbatch, after its forward: until its backward, then with the gradients.

    The graph of the stage's part begins here, with a node that keeps gradients of what came in, and no values. A leaf
    would hold its values as long as its gradient is waited for, also where the stage has saved nothing of
    them, or has them in a store.
    """

    def __init__(self, received: Carried) -> None:
        self._spec = received.spec
        self._device = received.tensors[0].device if received.tensors else torch.device("cpu")
        self._found: list[Tensor | None] = []

    def opened(self, received: Carried) -> Carried:
        """The same values, from which the stage's graph comes back here."""
        needs = self._spec.needs_grad
        values = [tensor for tensor, needed in zip(received.tensors, needs, strict=True) if needed]
        if not values:
            return received
        anchor = torch.empty((), device=self._device, requires_grad=True)
        given = iter(_Begin.apply(anchor, self._found, values))  # type: ignore[no-untyped-call]
        tensors = (next(given) if needed else tensor for tensor, needed in zip(received.tensors, needs, strict=True))
        return Carried(tuple(tensors), self._spec)

    def gradients(self) -> list[Tensor]:
        """Of the tensors that need one: zeros where nothing used them."""
        shapes = [shape for shape, needed in zip(self._spec.tensors, self._spec.needs_grad, strict=True) if needed]
        found = self._found or [None] * len(shapes)
        return [
            torch.zeros(shape.shape, dtype=shape.dtype, device=self._device) if gradient is None else gradient
            for shape, gradient in zip(shapes, found, strict=True)
        ]


class _Begin(torch.autograd.Function):
    """Values in a list, which autograd does not look into, become the outputs of a node that keeps none of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: list[Tensor | None], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.found[:] = gradients
        return None, None, None


_Entry = tuple[nn.Parameter, Tensor, Tensor | None, bool]
"""(parameter, dy, x, is its first dimension that of x) of a weight; (parameter, dy, None, False) of a bias."""


class WeightGradients:
    """Puts off the weight gradients of a stage's linear layers while `put_off` is entered, and makes them in `make`."""

    def __init__(self, modules: Iterable[nn.Module], ledger: ModelPatches) -> None:
        """modules: of the stage."""
        self._entries: dict[int, list[_Entry]] = {}
        self._open: list[_Entry] | None = None
        LinearLayers(modules, self._put, ledger)

    @contextmanager
    def put_off(self, microbatch: int) -> Iterator[None]:
        """In the context the backward of the layers leaves their weights' gradients for `make(microbatch)`."""
        self._open = self._entries.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def make(self, microbatch: int) -> None:
        """Adds to `param.grad` what was put off."""
        for param, dy, x, is_transposed in self._entries.pop(microbatch, []):
            gradient = gradient_of(dy, x, is_transposed)
            if param.grad is None:
                param.grad = gradient.to(param.dtype)
            else:
                param.grad += gradient

    def forget(self) -> None:
        """Drops what was put off: after an error."""
        self._entries.clear()

    def _put(self, param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor | None:
        """None where the gradient is made later; not where a hook is to see it, as one that sums it over ranks."""
        if self._open is None or param._backward_hooks:
            return gradient_of(dy, x, is_transposed)
        # Kept until W, the graph of x would keep what the stage has received.
        self._open.append((param, dy, None if x is None else x.detach(), is_transposed))
        return None
