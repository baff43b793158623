"""The weight half of a backward, put off: what zero-bubble schedules do in the gaps of a pipeline.

The stage before waits for dx alone, so the linear layers of a stage give it at once (I), and keep x and dy until there
is time for the gradients of their parameters (W). Other parameters (norms, embeddings, convolutions) get their
gradients in I: they cost little.
Source: zero bubble pipeline parallelism, arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..kernels.linear_layers import LinearLayers, gradient_of
from ..model.ledger import Ledger

_Entry = tuple[nn.Parameter, Tensor, Tensor | None, bool]
"""(parameter, dy, x, is its first dimension that of x) of a weight; (parameter, dy, None, False) of a bias."""


class WeightGradients:
    """Puts off the weight gradients of a stage's linear layers while `put_off` is entered, and makes them in `make`."""

    def __init__(self, modules: Iterable[nn.Module], ledger: Ledger) -> None:
        """modules: of the stage."""
        self._entries: dict[int, list[_Entry]] = {}
        self._open: list[_Entry] | None = None
        self._layers = LinearLayers(modules, self._put, ledger)

    @property
    def num_layers(self) -> int:
        return self._layers.num_layers

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
