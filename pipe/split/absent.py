"""A tensor with a shape and without values, in the place of a tensor that another pipeline stage computes (`Absent`).

[Note: absent tensors]
A stage replays the model's forward, so it runs code that uses values of earlier stages: an embedding, a block, an
encoder. This value is an `Absent`. It has shape, dtype and device, so masks, position ids and rotary tables come out
right. An operation on it runs on the meta device and gives another `Absent`. A tensor that arrives from the previous
stage is bound to its `Absent` (`bind`), which behaves as that tensor from then on, also where the forward still holds
the old object, as in `x = x + block(x)`. If code needs values that never arrive, an error names the parameter or the
block that they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_METADATA = frozenset(
    ("shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_cpu", "is_cuda", "is_meta", "is_sparse")
    + ("is_sparse_csr", "is_nested", "is_quantized", "is_mkldnn", "is_mps", "is_xpu", "is_leaf", "grad", "grad_fn")
    + ("itemsize", "nbytes", "names", "_backward_hooks", "output_nr", "retains_grad")
)
_NEW = frozenset(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
_LIKE = frozenset(("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"))
_SHAPED_AS = frozenset(("type_as", "to", "expand_as", "view_as", "reshape_as"))
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)


class Absent(Tensor):
    """A tensor without a value. See [Note: absent tensors].

    origin: name of the parameter or block that it comes from. run: its replay of a forward, or None.
    """

    origin: str
    run: Any
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: str, run: Any = None
    ) -> Absent:
        made: Absent = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.origin, made.run, made._value = origin, run, None
        return made

    def bind(self, value: Tensor) -> None:
        """Behave as `value`, a tensor of the same shape, from now on."""
        self._value = value

    @property
    def value(self) -> Tensor | None:
        """The bound tensor, or None."""
        return self._value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype}, from {self.origin!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in ("__get__", "__set__") and isinstance(args[0], Absent):
            return _attribute(func, args, kwargs)
        args, kwargs = tree_map(resolved, args), tree_map(resolved, kwargs)
        absents = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        if not absents:
            return func(*args, **kwargs)
        if name == "__repr__":
            return repr(absents[0])
        # There are no values to move.
        if name in ("cpu", "cuda"):
            return absents[0]
        # Shape, dtype and device are enough for these: the result is a real tensor.
        if (name in _NEW or name in _LIKE) and args and isinstance(args[0], Absent):
            return func(_placeholder(args[0]), *args[1:], **kwargs)
        if name in _SHAPED_AS and not isinstance(args[0], Absent):
            return func(args[0], *(_placeholder(arg) if isinstance(arg, Absent) else arg for arg in args[1:]), **kwargs)
        target = _written_to(name, args, kwargs)
        if target is not None and not isinstance(target, Absent):
            raise ValueError(
                f"the forward writes with {name} into a tensor of shape {tuple(target.shape)}, with values that "
                f"{_not_here(absents[0])}; build the tensor from its parts (torch.cat, torch.where), or move this code "
                "into a block"
            )
        result = _on_meta(func, name, args, kwargs, absents)
        # An in-place operation returns its target, which may be bound later.
        if isinstance(target, Absent) and isinstance(result, Absent) and result.shape == target.shape:
            return target
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # An operator that C++ code calls: Python calls are handled by `__torch_function__`.
        leaves = tree_leaves((args, kwargs or {}))
        absent = next(leaf for leaf in leaves if isinstance(leaf, Absent))
        raise ValueError(f"{func} needs values that {_not_here(absent)}")


def resolved(leaf: Any) -> Any:
    """Replace an `Absent` by its bound tensor, if it has a bound tensor. Returns every remaining value unchanged."""
    return leaf._value if isinstance(leaf, Absent) and leaf._value is not None else leaf


def is_missing(leaf: Any) -> bool:
    """Tell if the value is an `Absent` without a bound tensor."""
    return isinstance(leaf, Absent) and leaf._value is None


def _name_of(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    """Read or set an attribute such as `.shape` or `.T`."""
    absent: Absent = args[0]
    if absent._value is not None:
        return func(absent._value, *args[1:], **kwargs)
    name = _name_of(func.__self__)
    if name in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return _on_meta(func, name, args, kwargs, [absent])


def _placeholder(absent: Absent) -> Tensor:
    """Make a real tensor of the same shape, dtype and device that takes the memory of a single element."""
    return torch.empty((), dtype=absent.dtype, device=absent.device).expand(absent.shape)


def _written_to(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor that an operation changes in place, or None."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    in_place = name in _IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None


def _on_meta(func: Any, name: str, args: Any, kwargs: Any, absents: list[Absent]) -> Any:
    """Run an operation on the meta device; tensors of the result are absent. Raises ValueError if it needs values."""
    device = absents[0].device
    origin = absents[0].origin
    run = next((absent.run for absent in absents if absent.run is not None), None)

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Absent):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, Tensor):
            # With its strides, so that view() of a tensor with gaps fails as it would with values.
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        # torch refuses to copy a meta tensor to another device.
        is_device = isinstance(leaf, torch.device) or (name == "to" and isinstance(leaf, str))
        return torch.device("meta") if is_device else leaf

    def from_meta(leaf: Any) -> Any:
        return Absent(leaf.shape, leaf.dtype, device, origin, run) if isinstance(leaf, Tensor) else leaf

    try:
        # Gradients begin at the received tensors: absent tensors have no graph.
        with torch.no_grad():
            result = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} needs values that {_not_here(absents[0])} ({str(error).splitlines()[0]})") from error
    return tree_map(from_meta, result)


def _not_here(absent: Absent) -> str:
    stage = "this rank" if absent.run is None else f"pipeline stage {absent.run.stage}"
    return f"{stage} does not have: they come from '{absent.origin}' of an earlier or later stage"
