"""Placeholders in `param.grad` between the last backward of a step and its update.

The gradients are then reduced and sharded. If `param.grad` were None, torch's functions would silently do nothing. A
placeholder has no values, and raises an error that says how to get them. A cleared placeholder counts as no gradient.
`engine/step/clip_calls.py` also knows the class.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from .sequence import StateError

_HARMLESS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "is_sparse")
    ),
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
    "and engine.step(), and {operation} cannot use them. To clip them call engine.clip_grad_norm_(max_norm), or set "
    "gradient_clipping in the config. To read a gradient call engine.gradient(parameter) (safe_get_full_grad in "
    "lowtide.deepspeed). To update call engine.step()"
)
_REPLACED = (
    "parameter '{name}': its grad was replaced after the backward, but engine.step() uses the reduced gradient; change "
    "gradients in a hook (register_post_accumulate_grad_hook)"
)


class ReducedGradient(Tensor):
    """A gradient without values. See the top of the file."""

    cleared: set[int]
    """Shared set: gets the id of each placeholder that is zeroed in place."""
    arrived: Tensor | None
    """The gradient that autograd has added, in a backward that begins with this parameter's gradient."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ADDING and isinstance(args[0], ReducedGradient):
            # Autograd adds in place; with create_graph it adds out of place and sets `grad` to the result.
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
        if func in _HARMLESS or TracingContext.try_get() is not None:  # a compiler describes it beside its parameter
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _CLEARING:  # `zero_grad(set_to_none=False)`
            for placeholder in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                placeholder.cleared.add(id(placeholder))
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
"""Id of a parameter whose gradient was cleared -> whether it is None, not zero."""


class ReducedGradients:
    """Puts placeholders into the parameters, and removes them before autograd adds to `grad`."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """params: (name, parameter) pairs."""
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._gradients: list[ReducedGradient] = []
        self._cleared: set[int] = set()
        self.are_there = False

    def put(self) -> None:
        """Set the placeholders: the gradients are reduced."""
        # Made at the first call, and used in every step, as they have no values.
        if len(self._gradients) != len(self._params):
            self._gradients = [_placeholder(param, self._cleared) for param in self._params]
        with torch._C.DisableTorchFunctionSubclass():  # avoids a Python call for each released parameter
            for param, gradient in zip(self._params, self._gradients, strict=True):
                param.grad = gradient
        self.are_there = True

    def are_all(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are all placeholders, unchanged since `put`."""
        if not self.are_there:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            own = {id(param.grad) for param in self._params if param.grad is not None}
        return bool(own) and own == {id(gradient) for gradient in gradients}

    @contextmanager
    def set_aside(self, param: nn.Parameter | None) -> Iterator[None]:
        """Remove the gradient that autograd has just added to a parameter, and put it back after the block."""
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
        """Remove the placeholders before autograd adds to `grad`. Returns the gradients that were cleared since `put`.

        Raises StateError if the user has put a gradient in its place, as no update would use it. Returns {} if no
        placeholders are set.
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


def _placeholder(param: nn.Parameter, cleared: set[int]) -> ReducedGradient:
    """Make a placeholder of the parameter's shape, without memory."""
    gradient: ReducedGradient = Tensor._make_wrapper_subclass(
        ReducedGradient, param.shape, dtype=param.dtype, device=param.device
    )
    gradient.cleared, gradient.arrived = cleared, None
    return gradient
