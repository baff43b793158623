"""Let code outside autograd compute the weight gradients of linear layers, later or in given memory (`LinearLayers`).

The backward of y = x w^T + b has three products. The previous layer needs dx = dy w. Nothing needs dw = dy^T x and db
before the update, so they can be computed later, and written to any place.

Activation checkpointing needs no special case: only the backward of a layer, which runs once, asks for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model.patches import ModelPatches
from .dispatch import product_dtype

MakeGradient = Callable[[nn.Parameter, Tensor, Tensor | None, bool], Tensor | None]
"""(parameter, dy, x, is_transposed) -> gradient, or None if it is computed later. x is None for a bias. See
`gradient_of`."""


class LinearLayers:
    """Calls `make` in backward for each gradient of a linear layer's parameters, in the place of autograd.

    It overrides `forward` of the modules, not of their class. Autograd still computes all gradients if a forward is
    without gradients, compiled or transformed (`torch.func`), if the input is sparse or nested, if the weight is
    computed (weight norm), or if backward itself is differentiated.
    """

    def __init__(self, modules: Iterable[nn.Module], make: MakeGradient, patches: ModelPatches) -> None:
        """Override `forward` of the linear layers (torch's, and GPT-2's transposed Conv1D) among `modules`.

        patches: undoes the overrides. Copies of the layers then compute as plain layers.
        """
        self._make: MakeGradient | None = make
        for module in modules:
            is_transposed = transposes(module)
            if is_transposed is not None:
                patches.override(module, "forward", partial(self._forward, module, is_transposed))
        patches.callback(self._forget_make)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied layer calls this object with its copied parameters.
        return self

    def _forget_make(self) -> None:
        self._make = None

    def _forward(self, module: nn.Module, is_transposed: bool, *args: Any, **kwargs: Any) -> Tensor:
        if self._make is None or len(args) != 1 or kwargs or not _is_ordinary(module, args[0]):
            plain: Tensor = type(module).forward(module, *args, **kwargs)
            return plain
        (x,), weight, bias = args, module.weight, module.bias
        dtype = product_dtype(x)
        if x.dtype != dtype:  # dw must use the x of the forward's product
            x = x.to(dtype)
        result: Tensor = _Linear.apply(x, weight, bias, is_transposed, self._make)  # type: ignore[no-untyped-call]
        return result


def weight_gradient(dy: Tensor, x: Tensor, is_transposed: bool, out: Tensor | None = None) -> Tensor:
    """Compute dw of y = x w^T in the shape of w, with the same bits as autograd. dy: (..., out); x: (..., in).

    is_transposed: w is (in, out), not (out, in). out: a contiguous tensor for the result, or None.
    """
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    first, second = (inputs, rows) if is_transposed else (rows, inputs)
    # The operands in autograd's order: a transposed product may round differently.
    return first.t().mm(second) if out is None else torch.mm(first.t(), second, out=out)


def gradient_of(dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
    """Compute the gradient of a weight, or of a bias if x is None, with the same bits as autograd."""
    return dy.reshape(-1, dy.shape[-1]).sum(0) if x is None else weight_gradient(dy, x, is_transposed)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        is_transposed: bool,
        make: MakeGradient,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The parameter objects: hooks on saved tensors may return a different tensor with the same values.
        ctx.params, ctx.is_transposed, ctx.make = (weight, bias), is_transposed, make
        return functional.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (param, bias), is_transposed, make = ctx.params, ctx.is_transposed, ctx.make
        if torch.is_grad_enabled():  # create_graph: the result is differentiated again
            make = _make_now
        dx = dy.matmul((weight.t() if is_transposed else weight).to(dy.dtype)) if needs_x else None
        dweight = make(param, dy, x, is_transposed) if needs_weight else None
        dbias = make(bias, dy, None, False) if needs_bias else None
        return dx, dweight, dbias, None, None


def _make_now(param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
    return gradient_of(dy, x, is_transposed)


def _is_ordinary(module: nn.Module, x: Any) -> bool:
    """Tell if backward consists of plain products: see `LinearLayers` for the exceptions."""
    params = [param for param in (module.weight, module.bias) if param is not None]
    return (
        torch.is_grad_enabled()
        and all(isinstance(param, nn.Parameter) for param in params)  # not computed, and not absent in a probe
        and any(param.requires_grad for param in params)
        and type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def transposes(module: nn.Module) -> bool | None:
    """Return False for a linear layer, True for a linear layer with weight (in, out), None for any other module."""
    # This layer is overridden already, so its backward is not known.
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return False
    return True if is_conv1d(module) else None


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, with a weight of (in, out)."""
    # By name, because transformers is optional and must not be imported for this.
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
