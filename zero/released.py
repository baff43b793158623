"""Released parameters: the class that a parameter has while its full values are freed.

A released parameter keeps shape, dtype, device and gradient, which modules read at any time. An operation on its values
gathers it if its `Reader` allows that, which is so while the model or its loss computes. Else it raises
`ReleasedParameterError` with the parameter's name. Its data is an expanded NaN, so C++ code that bypasses the check
does not train silently on garbage. A write there ends the process: `broadcast` of torch 2.11 with gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn


class ReleasedParameterError(RuntimeError):
    """Values of a parameter were read while only shards of it exist."""


_ATTRIBUTES = """
    shape dtype device requires_grad grad is_leaf grad_fn ndim layout is_cuda is_sparse is_meta is_quantized is_cpu
    itemsize nbytes is_nested _version _backward_hooks _post_accumulate_grad_hooks
"""
_HARMLESS = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()} | {
    getattr(Tensor, "requires_grad").__set__,  # noqa: B009  (a descriptor: mypy takes it for its value)
    getattr(Tensor, "grad").__set__,  # noqa: B009
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.__hash__,
    Tensor.__format__,
    torch.autograd.grad,  # as inputs to differentiate
    torch.autograd.backward,
    Tensor.backward,
    torch.is_tensor,
    torch.is_floating_point,
    torch.numel,
}


_DATA = getattr(Tensor, "data").__get__  # noqa: B009
_WITHOUT_GRADIENT = {
    _DATA,
    Tensor.detach,
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__array__,
}

Reader = Callable[[bool, list["ReleasedParameter"]], bool]
"""Gathers a parameter that is read outside of its unit's forward. Returns False if that is not allowed now.

Arguments: whether the read is differentiated, which means that all ranks do it, as they run the same backward; and all
released parameters that the same call reads, which must be full together.
"""

_READERS = WeakValueDictionary[int, Reader]()  # by identity of the parameter


def set_reader(param: nn.Parameter, reader: Reader) -> Callable[[], object]:
    """Set the reader of a parameter. Returns a function that removes it.

    The reader lives as long as that function: see [Note: forgotten] in `hooks.py`.
    """
    _READERS[id(param)] = reader
    return partial(_take_reader, id(param), reader)


def _take_reader(key: int, reader: Reader) -> None:
    if _READERS.get(key) is reader:
        del _READERS[key]


class ReleasedParameter(nn.Parameter):
    """A parameter whose values are released. See the top of the file."""

    lowtide_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS:
            # Else `func` would come back here without end.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        released = [a for a in _flatten((args, kwargs)) if isinstance(a, ReleasedParameter)]
        is_differentiated = torch.is_grad_enabled() and func not in _WITHOUT_GRADIENT
        readers = [_READERS.get(id(param)) for param in released]
        # A closed engine has removed its readers.
        if released and all(reader is not None and reader(is_differentiated, released) for reader in readers):
            # With the parameter's version, unlike `.data`: a write, which the next release drops, is then noticed.
            return func(*args, **(kwargs or {})) if func != _DATA else Tensor.detach(*args)
        # A reader may have gathered the first of them. None: the parameter is inside of an object that was passed.
        name = next((param.lowtide_name for param in released if isinstance(param, ReleasedParameter)), None)
        what = "a parameter" if name is None else f"parameter '{name}'"
        operation = getattr(func, "__name__", str(func))
        if operation == "__get__":
            operation = "an attribute that needs values"
        raise ReleasedParameterError(
            f"{what} is released: only its shards exist here, so {operation} cannot read it. Its values exist "
            "in the forward and backward of the model, and in methods of its modules. Elsewhere use "
            "`with engine.gathered(parameter):` (zero.GatheredParameters(parameter) in lowtide.deepspeed). To save the "
            "model, call engine.state_dict() (module_state_dict() in lowtide.deepspeed) or engine.export(folder) on "
            "all ranks."
        )

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return f"ReleasedParameter({self.lowtide_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        reader = _READERS.get(id(self))
        if reader is not None and reader(False, [self]):
            copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
            return copied
        raise ReleasedParameterError(
            f"parameter '{self.lowtide_name}' is released and cannot be copied; copy the model before initialize, or "
            "use engine.state_dict()"
        )


def mark_released(params: Iterable[nn.Parameter], names: Iterable[str]) -> None:
    """Make reads of these parameters raise an error with their names."""
    for param, name in zip(params, names, strict=True):
        # A user's subclass keeps its class; its values are NaN all the same. The class changes, not the object: the
        # module, the optimizer and the user hold references to it.
        if type(param) is nn.Parameter:
            param.__class__ = ReleasedParameter
            param.lowtide_name = name  # type: ignore[attr-defined]


def mark_present(params: Iterable[nn.Parameter]) -> None:
    """Undo `mark_released`."""
    for param in params:
        # A user's subclass was not marked: see `mark_released`.
        if type(param) is ReleasedParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]


def _flatten(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, Mapping):
        yield from _flatten(list(value.values()))
    else:
        yield value
