"""Linear layers whose parameters get their gradients from somebody else: later, or in memory of his own.

A linear layer y = x w^T + b has three products in its backward. What goes on to the layer before is dx = dy w; the
gradients dw = dy^T x and db are needed by nobody before the update, so their owner may choose when they are made, and
where they are put.

Recomputed forwards (activation checkpointing) need nothing special: a gradient is asked for by the backward of a layer,
which runs once, and not by its forward, which runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model.patches import ModelPatches

MakeGradient = Callable[[nn.Parameter, Tensor, Tensor | None, bool], Tensor | None]
"""(parameter, dy, x, is its first dimension that of x) -> its gradient, or None where it is not made now; x is None for
a bias. See `weight_gradient` and `bias_gradient`."""


class LinearLayers:
    """Has `make` called for each gradient of a linear layer's own parameters, in place of autograd.

    Everything else is as it was: a forward without gradients, one that is compiled or transformed (`torch.func`), an
    input that is no plain tensor (sparse, nested), a weight that is computed (weight norm), a backward that is itself
    differentiated. The layers get a `forward` of their own, so that their class stays what it is for other models.
    """

    def __init__(self, modules: Iterable[nn.Module], make: MakeGradient, ledger: ModelPatches) -> None:
        """modules: linear ones among them (torch's, and GPT-2's transposed Conv1D) are taken; others are left.

        ledger: takes the layers' forwards off; copies of the layers compute as plain ones from then on.
        """
        self._make: MakeGradient | None = make
        for module in modules:
            is_transposed = _transposes(module)
            if is_transposed is not None:
                ledger.override(module, "forward", partial(self._forward, module, is_transposed))
        ledger.callback(self._forget_make)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied layer computes with its own parameters, of which `make` knows nothing."""
        return self

    def _forget_make(self) -> None:
        self._make = None

    def _forward(self, module: nn.Module, is_transposed: bool, *args: Any, **kwargs: Any) -> Tensor:
        if self._make is None or len(args) != 1 or kwargs or not _is_ordinary(module, args[0]):
            plain: Tensor = type(module).forward(module, *args, **kwargs)
            return plain
        (x,), weight, bias = args, module.weight, module.bias
        # Of the meta device, on which a planner runs a model, torch knows no autocast.
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as it is multiplied, so that dw is of the same product
        result: Tensor = _Linear.apply(x, weight, bias, is_transposed, self._make)  # type: ignore[no-untyped-call]
        return result


def weight_gradient(dy: Tensor, x: Tensor, is_transposed: bool, out: Tensor | None = None) -> Tensor:
    """dw of y = x w^T, in the shape of w, the same bits as autograd's. dy: (..., out), x: (..., in).

    is_transposed: w is (in, out), not (out, in). out: where to put it, of that shape and dtype, contiguous.
    """
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    first, second = (inputs, rows) if is_transposed else (rows, inputs)
    return first.t().mm(second) if out is None else torch.mm(first.t(), second, out=out)


def bias_gradient(dy: Tensor) -> Tensor:
    """db of y = x w^T + b: (..., out) -> (out,)."""
    return dy.reshape(-1, dy.shape[-1]).sum(0)


def gradient_of(dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
    """What autograd would have made: of a weight, or of a bias where x is None."""
    return bias_gradient(dy) if x is None else weight_gradient(dy, x, is_transposed)


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
        # The parameters themselves: what is saved may come back as another tensor with the same values.
        ctx.params, ctx.is_transposed, ctx.make = (weight, bias), is_transposed, make
        return functional.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (param, bias), is_transposed, make = ctx.params, ctx.is_transposed, ctx.make
        if torch.is_grad_enabled():  # create_graph: what is returned here is differentiated again
            make = _make_now
        dx = dy.matmul((weight.t() if is_transposed else weight).to(dy.dtype)) if needs_x else None
        dweight = make(param, dy, x, is_transposed) if needs_weight else None
        dbias = make(bias, dy, None, False) if needs_bias else None
        return dx, dweight, dbias, None, None


def _make_now(param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
    return gradient_of(dy, x, is_transposed)


def _is_ordinary(module: nn.Module, x: Any) -> bool:
    """Whether a backward of two products is all there is to it."""
    params = [param for param in (module.weight, module.bias) if param is not None]
    return (
        torch.is_grad_enabled()
        and all(isinstance(param, nn.Parameter) for param in params)  # else computed, or absent in a probe
        and any(param.requires_grad for param in params)
        and type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _transposes(module: nn.Module) -> bool | None:
    """False for a linear layer, True for one whose weight is (in, out), None for what is neither."""
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return False
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return True if is_conv1d else None
