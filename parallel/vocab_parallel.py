"""Logits split over ranks by vocabulary, and losses over them, so that no rank holds all logits.

[Note: logits in parts]
A head that is split over the vocabulary returns `VocabParallelLogits` in place of a tensor. It has the shape of all
logits, and `__torch_function__` receives torch functions on it. Changes of shape before the last dimension, casts and
elementwise arithmetic run on the rank's part. `cross_entropy` runs over all parts; each rank sends three numbers per
token. So the losses of Hugging Face models, nn.CrossEntropyLoss and a loss_fn all work unchanged. Any other function
gets the whole logits, gathered, with a line in the log.
Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ..comm import Collectives
from .chunked_logits import computed, split_cross_entropy
from .collectives import joined_columns

_SHAPES = {"contiguous", "clone", "float", "double", "half", "bfloat16", "to", "type", "detach", "cpu"}
_EACH = {"mul", "div", "add", "sub", "neg", "tanh", "clamp"}
_ATTRIBUTES = {
    "dtype",
    "device",
    "ndim",
    "dim",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_meta",
    "grad_fn",
    "is_sparse",
}


class VocabParallelLogits:
    """This rank's part of logits along the last dimension. See [Note: logits in parts]."""

    def __init__(self, own: Tensor, numel: int, first: int, exchange: Collectives) -> None:
        """own: (..., n), this rank's part of (..., numel), from index `first` on."""
        self.own = own
        self._numel = numel
        self._first = first
        # In a closure: code that looks for tensors in an output walks through attributes.
        self._through: Callable[[], Collectives] = lambda: exchange

    # -- as a tensor ----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.own.shape[:-1], self._numel))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        return self._viewed(Tensor.view, *shape, **kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self._viewed(Tensor.reshape, *shape, **kwargs)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        return self._viewed(Tensor.flatten, start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        used = index if isinstance(index, tuple) else (index,)
        if all(one is Ellipsis or type(one) in (slice, int) for one in used):
            found = self._as_meta()[index]
            if found.shape[-1:] == (self._numel,) and found.stride(-1) == 1:
                return self._with(self.own[index])
        return self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        if name in _SHAPES or name in _EACH:
            own = getattr(self.own, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if any(map(_has_share, (*args, *kwargs.values()))):
                    return getattr(self.whole(), name)(*args, **kwargs)
                found = own(*args, **kwargs)
                return self._with(found) if isinstance(found, Tensor) else found

            return call
        if name in _ATTRIBUTES:
            return getattr(self.own, name)
        # copy and pickle ask for such names. That must not gather.
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            _refuse_change(name)
        if name in ("register_hook", "retain_grad"):
            raise TypeError(
                f"{name}: logits of a head that parallel.tensor has split have no gradient of all logits on a rank; "
                'set "column_gathered" for the head in tensor_parallel.plan'
            )
        return getattr(self.whole(), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_change("[...] =")

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"VocabParallelLogits(shape={tuple(self.shape)}, own={tuple(self.own.shape)})"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.cross_entropy and (loss := _loss(*args, **kwargs)) is not NotImplemented:
            return loss
        name = getattr(function, "__name__", "")
        if args and isinstance(args[0], cls) and (name in _EACH or name in _SHAPES or name in ("reshape", "flatten")):
            return getattr(args[0], name)(*args[1:], **kwargs)

        if name.endswith("_") and not name.endswith("__"):
            _refuse_change(name)
        return function(*map(_with_all, args), **{key: _with_all(value) for key, value in kwargs.items()})

    # -- its parts ------------------------------------------------------------------------------------------------

    def whole(self) -> Tensor:
        """Return all logits on every rank. A collective; uneven parts are padded."""
        return joined_columns(computed(self.own, "what needs all"), self._through(), self._numel, "logits")

    def _as_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def _viewed(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        """Change the shape. If the last dimension or the dtype changes, all logits are gathered."""
        found = function(self._as_meta(), *args, **kwargs)
        if found.dtype != self.dtype or found.shape[-1:] != (self._numel,):
            return function(self.whole(), *args, **kwargs)
        return self._with(self.own.reshape(*found.shape[:-1], self.own.shape[-1]))

    def _with(self, own: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(own, self._numel, self._first, self._through())

    def cross_entropy(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return (tokens,) losses of (tokens, numel) logits, 0 for an ignored target. Raises IndexError for an invalid
        target.
        """
        if target.device.type == "cpu":  # on a device the host would wait
            outside = target[((target < 0) | (target >= self._numel)) & (target != ignore_index)]
            if outside.numel():
                raise IndexError(f"Target {int(outside[0])} is out of bounds.")  # torch's text
        return split_cross_entropy(self.own, target, self._first, ignore_index, self._through())


def _has_share(value: Any) -> bool:
    """Return whether an argument would need a split too, or would get a partial gradient."""
    return isinstance(value, VocabParallelLogits) or (
        isinstance(value, Tensor) and (value.ndim > 0 or value.requires_grad)
    )


def _with_all(value: Any) -> Any:
    """Replace parts of logits by all logits, also within sequences."""
    if isinstance(value, (list, tuple)) and any(isinstance(one, VocabParallelLogits) for one in value):
        return type(value)(map(_with_all, value))
    return value.whole() if isinstance(value, VocabParallelLogits) else value


def _refuse_change(name: str) -> NoReturn:
    raise TypeError(
        f"logits of a head that parallel.tensor has split cannot be changed in place, found {name}; use a function "
        'that returns a new tensor (masked_fill, torch.where), or set "column_gathered" for the head in '
        "tensor_parallel.plan"
    )


def _of_each(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.__getattr__(name)(*args)


def _of_whole(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(Tensor, name)(self.whole(), *map(_with_all, args))


# Python looks up operators on the class only.
_OPERATORS = {"mul": "mul", "rmul": "mul", "truediv": "div", "add": "add", "radd": "add", "sub": "sub", "neg": "neg"}
for _name, _function in _OPERATORS.items():
    setattr(VocabParallelLogits, f"__{_name}__", _of_each(_function))
_OF_WHOLE = ("eq", "ne", "lt", "le", "gt", "ge", "pow", "rpow", "rsub", "rtruediv", "matmul", "rmatmul", "abs", "iter")
for _name in _OF_WHOLE:
    setattr(VocabParallelLogits, f"__{_name}__", _of_whole(f"__{_name}__"))


def _loss(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss of class indices for rows of logits, without weights, else return NotImplemented."""
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not is_plain or not isinstance(input, VocabParallelLogits) or input.dim() != 2 or target.is_floating_point():
        return NotImplemented
    losses = input.cross_entropy(target, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = (target != ignore_index).sum()
    return (losses.sum() / count.clamp(min=1)).where(count > 0, math.nan)  # as torch: NaN, with gradients of 0
