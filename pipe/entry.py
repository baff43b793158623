"""Where the graph of a stage's part of a microbatch begins: it keeps gradients of what came in, and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .split.carried import Carried


class Entry:
    """What a stage has received for a microbatch, after its forward: until its backward, then with the gradients.

    A leaf would hold its values as long as its gradient is waited for, also where the stage has saved nothing of them,
    or has them in a store.
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
