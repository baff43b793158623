"""What stands in `param.grad` between the last backward of a step and its update.

The gradients are reduced and divided over the ranks then, and `param.grad` would be None. torch's functions take that
for "nothing to do", and would do nothing without a word. So there is a gradient that has no values, and says where they
are when anybody asks for them. It may be cleared, and is none from then on. `engine/step/clip_calls.py` knows it too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_ADDING = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_CLEARING = {Tensor.zero_, torch._foreach_zero_}
_NO_VALUES = (
    "the gradients of this step are reduced and divided over the ranks, so param.grad has no values between backward "
    "and engine.step(), and {operation} cannot use them: engine.clip_grad_norm_(max_norm), or gradient_clipping in the "
    "config, clips them, engine.gradient(parameter) (safe_get_full_grad in lowtide.deepspeed) shows one, and "
    "engine.step() updates with them"
)
_REPLACED = (
    "parameter '{name}': expected the gradient that was reduced, found another one that was put into its grad after "
    "the backward, which engine.step() would not use; change gradients in a hook (register_post_accumulate_grad_hook)"
)


class ReducedGradient(Tensor):
    """A gradient without values. See the top of the file."""

    cleared: set[int]
    """Gets the identity of each that was cleared in place."""
    arrived: Tensor | None
    """What autograd has added to it, in a backward that begins with the gradient of a parameter."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ADDING and isinstance(args[0], ReducedGradient):
            args[0].arrived = args[1].clone()
            return args[0] if func is torch.ops.aten.add_.Tensor else args[0].arrived
        raise StateError(_NO_VALUES.format(operation=func))

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
            for one in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                one.cleared.add(id(one))
            return args[0] if isinstance(args[0], Tensor) else None
        if func == Tensor.nbytes.__get__:  # type: ignore[attr-defined]  # a descriptor: mypy takes it for its value
            return 0
        operation = getattr(func, "__name__", str(func))
        if operation == "__get__":
            operation = "an attribute of it"
        raise StateError(_NO_VALUES.format(operation=operation))

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return "ReducedGradient()"


Cleared = dict[int, bool]
"""Identity of a parameter whose gradient was cleared -> whether it is None, and not zero."""


class ReducedGradients:
    """Puts a `ReducedGradient` into the parameters, and takes it out before autograd adds to it."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """params: with their names."""
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._gradients: list[ReducedGradient] = []
        self._cleared: set[int] = set()
        self.are_there = False

    def put(self) -> None:
        """The gradients are reduced: from now on they are not in `param.grad`."""
        if len(self._gradients) != len(self._params):
            self._gradients = [_stand_in(param, self._cleared) for param in self._params]
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would cost a call of Python
            for param, gradient in zip(self._params, self._gradients, strict=True):
                param.grad = gradient
        self.are_there = True

    def are_all(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are all that was put, and neither taken out nor cleared since."""
        if not self.are_there:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            own = {id(param.grad) for param in self._params if param.grad is not None}
        return bool(own) and own == {id(gradient) for gradient in gradients}

    @contextmanager
    def set_aside(self, param: nn.Parameter | None) -> Iterator[None]:
        """The gradient that autograd has just added to that of a parameter is not there inside, and is there after."""
        if param is None:
            yield
            return
        gradient = param.grad
        if isinstance(gradient, ReducedGradient):
            arrived, gradient.arrived = gradient.arrived, None
        else:
            arrived, param.grad = gradient, None
        yield
        param.grad = arrived

    def take_out(self) -> Cleared:
        """Autograd may add to `param.grad` from now on. Returns what was cleared since `put`.

        Raises StateError where somebody has put a gradient of his own in its place, which nobody would use. Does
        nothing where they are not there.
        """
        if not self.are_there:
            return {}
        self.are_there = False
        with torch._C.DisableTorchFunctionSubclass():
            found = [param.grad for param in self._params]
            for param in self._params:
                param.grad = None
        cleared = set(self._cleared)
        self._cleared.clear()
        if not cleared and all(map(operator.is_, found, self._gradients)):
            return {}
        for now, own, name in zip(found, self._gradients, self._names, strict=True):
            if now is not None and now is not own:
                raise StateError(_REPLACED.format(name=name))
        now_and_params = zip(found, self._params, strict=True)
        return {id(param): now is None for now, param in now_and_params if now is None or id(now) in cleared}

    @property
    def num_params(self) -> int:
        return len(self._params)


def _stand_in(param: nn.Parameter, cleared: set[int]) -> ReducedGradient:
    """Of the parameter's shape, which torch asks for, without memory."""
    gradient: ReducedGradient = Tensor._make_wrapper_subclass(
        ReducedGradient, param.shape, dtype=param.dtype, device=param.device
    )
    gradient.cleared, gradient.arrived = cleared, None
    return gradient
