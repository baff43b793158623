"""What stands in `param.grad` between the last backward of a step and its update.

The gradients are reduced and divided over the ranks then, and `param.grad` would be None. torch's `clip_grad_norm_` and
the `step` of an optimizer take that for "nothing to do", and would do nothing without a word. So there is a gradient
that has no values, and says where they are when anybody asks for them. It may be cleared at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .sequence import StateError

_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf")),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__hash__,
    Tensor.requires_grad_,
    Tensor.detach_,
}
_CLEARING = {Tensor.zero_, torch._foreach_zero_}


class ReducedGradient(Tensor):
    """A gradient without values. See the top of the file."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _CLEARING:  # `zero_grad(set_to_none=False)`
            return args[0] if isinstance(args[0], Tensor) else None
        if func == Tensor.nbytes.__get__:  # type: ignore[attr-defined]  # a descriptor: mypy takes it for its value
            return 0
        operation = getattr(func, "__name__", str(func))
        if operation == "__get__":
            operation = "an attribute of it"
        raise StateError(
            f"the gradients of this step are reduced and divided over the ranks, so param.grad has no values between "
            f"backward and engine.step(), and {operation} cannot use them: engine.clip_grad_norm_(max_norm), or "
            "gradient_clipping in the config, clips them, engine.gradient(parameter) shows one, and engine.step() "
            "updates with them"
        )

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return "ReducedGradient()"


class ReducedGradients:
    """Puts a `ReducedGradient` into the parameters, and takes it out before autograd adds to it."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._gradients: list[ReducedGradient] = []
        self._are_there = False

    def put(self) -> None:
        """The gradients are reduced: from now on they are not in `param.grad`."""
        if len(self._gradients) != len(self._params):
            self._gradients = [_stand_in(param) for param in self._params]
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would cost a call of Python
            for param, gradient in zip(self._params, self._gradients, strict=True):
                param.grad = gradient
        self._are_there = True

    def take_out(self) -> None:
        """Autograd may add to `param.grad` from now on. Does nothing where they are not there."""
        if self._are_there:
            self._are_there = False
            with torch._C.DisableTorchFunctionSubclass():
                for param in self._params:
                    param.grad = None


def _stand_in(param: nn.Parameter) -> ReducedGradient:
    """Of the parameter's shape, which torch asks for, with memory for one element."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape).as_subclass(ReducedGradient)
