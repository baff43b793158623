"""The weight half of a backward, put off: what zero-bubble schedules do in the gaps of a pipeline.

A linear layer y = x w^T has two products in its backward, dx = dy w and dw = dy^T x. The stage before waits for dx
alone, so the layers of a stage give it at once (I), and keep x and dy until there is time for dw (W). Other parameters
(norms, embeddings, convolutions) get their gradients in I: they cost little.

Recomputed forwards (activation checkpointing) need nothing special: what is put off is noted by the backward of a
layer, which runs once, and not by its forward, which runs twice.
Source: zero bubble pipeline parallelism, arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_Entry = tuple[nn.Parameter, Tensor, Tensor, bool]
"""(parameter, dy, x, is its first dimension that of x) of a weight; (parameter, dy, dy, False) of a bias."""


class WeightGradients:
    """Puts off the weight gradients of a stage's linear layers while `put_off` is entered, and makes them in `make`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: of the stage; linear ones among them (torch's, and GPT-2's transposed Conv1D) get a forward."""
        self._entries: dict[int, list[_Entry]] = {}
        self._open: list[_Entry] | None = None
        self._modules = [module for module in modules if _transposes(module) is not None]
        for module in self._modules:
            # A module's own attribute, so that the class stays what it is for other models.
            module.forward = partial(self._linear, module, bool(_transposes(module)))

    @property
    def num_layers(self) -> int:
        return len(self._modules)

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
            gradient = _weight_gradient(dy, x, is_transposed) if x is not dy else _bias_gradient(dy)
            if param.grad is None:
                param.grad = gradient.to(param.dtype)
            else:
                param.grad += gradient

    def forget(self) -> None:
        """Drops what was put off: after an error."""
        self._entries.clear()

    def remove(self) -> None:
        """The layers are as they were."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    def _linear(self, module: nn.Module, is_transposed: bool, x: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        params = [param for param in (weight, bias) if isinstance(param, nn.Parameter)]  # absent in a probe
        if not (torch.is_grad_enabled() and any(param.requires_grad for param in params)):
            plain: Tensor = type(module).forward(module, x)
            return plain
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as it is multiplied, so that dw is of the same product
        result: Tensor = _Linear.apply(x, weight, bias, is_transposed, self._put)  # type: ignore[no-untyped-call]
        return result

    def _put(self, entry: _Entry) -> bool:
        """True where the gradient is made later."""
        if self._open is None:
            return False
        self._open.append(entry)
        return True


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        is_transposed: bool,
        put: Callable[[_Entry], bool],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The parameters themselves: what is saved may come back as another tensor with the same values.
        ctx.params, ctx.is_transposed, ctx.put = (weight, bias), is_transposed, put
        return functional.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x = x.detach()  # kept until W, its graph would keep what the stage has received
        param, bias = ctx.params
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dy.matmul((weight.t() if ctx.is_transposed else weight).to(dy.dtype)) if needs_x else None
        dweight = dbias = None
        if needs_weight and not ctx.put((param, dy, x, ctx.is_transposed)):
            dweight = _weight_gradient(dy, x, ctx.is_transposed)
        if needs_bias and not ctx.put((bias, dy, dy, False)):
            dbias = _bias_gradient(dy)
        return dx, dweight, dbias, None, None


def _weight_gradient(dy: Tensor, x: Tensor, is_transposed: bool) -> Tensor:
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return inputs.t().mm(rows) if is_transposed else rows.t().mm(inputs)


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0)


def _transposes(module: nn.Module) -> bool | None:
    """False for a linear layer, True for one whose weight is (in, out), None for what is neither."""
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return False
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return True if is_conv1d else None
