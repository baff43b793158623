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
from ..kernels.dispatch import once_differentiable
from .chunked_logits import ChunkedLogits, computed, tiled_cross_entropy
from .collectives import joined_columns

_SHAPES = {"contiguous", "clone", "float", "double", "half", "bfloat16", "to", "type", "detach", "cpu"}
_EACH = {"mul", "div", "add", "sub", "neg", "tanh", "clamp", "__mul__", "__truediv__", "__rmul__", "__add__", "__sub__"}


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

    def dim(self) -> int:
        return self.own.dim()

    @property
    def ndim(self) -> int:
        return self.own.dim()

    def numel(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *given: Any, shape: Any = None) -> Any:
        return self.view(*given) if shape is None else self.view(shape)

    def view(self, *shape: Any) -> Any:
        """Change the shape. If the last dimension changes, all logits are gathered."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self.whole().view(shape[0])
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        last = wanted[-1]
        if last == -1 and -1 not in wanted[:-1]:
            before = math.prod(wanted[:-1])
            last = self.numel() // before if before else -1
        if last != self._numel:
            return self.whole().reshape(wanted)
        return self._with(self.own.reshape(*wanted[:-1], self.own.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.dim() == self.dim() - 1 and start_dim % self.dim() != end_dim % self.dim():
            return self.whole().flatten(start_dim, end_dim)
        return self._with(self.own.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        used = index if isinstance(index, tuple) else (index,)
        if not all(one is Ellipsis or type(one) in (slice, int) for one in used):
            return self.whole()[index]
        is_last_of_all = any(one is Ellipsis for one in used[:-1]) or len(used) == self.dim()
        if is_last_of_all and used[-1] is not Ellipsis and used[-1] != slice(None):
            return self.whole()[index]
        if used[-1] is Ellipsis and len(used) > self.dim():
            return self.whole()[index]
        return self._with(self.own[index])

    def __getattr__(self, name: str) -> Any:
        if name in _SHAPES or name in _EACH:
            own = getattr(self.own, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if any(map(_has_share, (*args, *kwargs.values()))):
                    return getattr(self.whole(), name)(*args, **kwargs)
                found = own(*args, **kwargs)
                return self._with(found) if isinstance(found, Tensor) else found

            return call
        if name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "is_meta", "grad_fn", "is_sparse"):
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

    def __mul__(self, other: Any) -> Any:
        return self.__getattr__("mul")(other)

    def __truediv__(self, other: Any) -> Any:
        return self.__getattr__("div")(other)

    def __add__(self, other: Any) -> Any:
        return self.__getattr__("add")(other)

    def __sub__(self, other: Any) -> Any:
        return self.__getattr__("sub")(other)

    def __neg__(self) -> Any:
        return self.__getattr__("neg")()

    __rmul__, __radd__ = __mul__, __add__

    def __repr__(self) -> str:
        return f"VocabParallelLogits(shape={tuple(self.shape)}, own={tuple(self.own.shape)})"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.cross_entropy and _is_covered(*args, **kwargs):
            return _cross_entropy(*args, **kwargs)
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
        if isinstance(self.own, ChunkedLogits):
            return tiled_cross_entropy(self.own, target, self._first, ignore_index, self._through())
        loss: Tensor = _CrossEntropy.apply(self.own, target, self._first, ignore_index, self._through())  # type: ignore[no-untyped-call]
        return loss


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


def _of_whole(name: str) -> Callable[..., Any]:
    def method(self: VocabParallelLogits, *args: Any) -> Any:
        return getattr(Tensor, name)(self.whole(), *map(_with_all, args))

    return method


# Python looks up operators on the class only.
_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "pow", "rpow", "rsub", "rtruediv", "matmul", "rmatmul", "abs", "iter")
for _name in _OPERATORS:
    setattr(VocabParallelLogits, f"__{_name}__", _of_whole(f"__{_name}__"))


def _is_covered(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    """Return whether the loss has class indices for rows of logits, without weights or smoothing."""
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    return is_plain and isinstance(input, VocabParallelLogits) and input.dim() == 2 and not target.is_floating_point()


def _cross_entropy(
    input: VocabParallelLogits,
    target: Tensor,
    *args: Any,
    ignore_index: int = -100,
    reduction: str = "mean",
    **kwargs: Any,
) -> Tensor:
    if len(args) > 2:  # weight, size_average, ignore_index, reduce, reduction
        ignore_index = args[2]
    if len(args) > 4:
        reduction = args[4]
    losses = input.cross_entropy(target, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = (target != ignore_index).sum()
    return (losses.sum() / count.clamp(min=1)).where(count > 0, math.nan)  # as torch: NaN, with gradients of 0


class _CrossEntropy(torch.autograd.Function):
    """loss[t] = log sum_v exp x[t, v] - x[t, target[t]], with v split over the ranks.

    dx = (softmax(x) - onehot(target)) dloss. Each rank gathers three numbers per token: its largest logit, the sum of
    exponentials relative to it, and the target's logit if that is local.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, first: int, ignore_index: int, exchange: Collectives) -> Tensor:
        logits = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        own = target - first
        is_own = (own >= 0) & (own < logits.shape[1]) & (target != ignore_index)
        most = logits.max(dim=1).values
        exponentials = (logits - most[:, None]).exp_()
        # A rank without the target takes a valid index and gives 0 to the sum over ranks.
        chosen = logits.gather(1, own.where(is_own, 0)[:, None])[:, 0].where(is_own, 0)
        parts = exchange.gather(torch.stack([most, exponentials.sum(dim=1), chosen])[None], 0, "the loss of logits")
        overall = parts[:, 0].max(dim=0).values
        total = (parts[:, 1] * (parts[:, 0] - overall).exp()).sum(dim=0)
        losses = (overall + total.log() - parts[:, 2].sum(dim=0)).where(target != ignore_index, 0)
        # They become the softmax over all ranks in the same memory.
        exponentials *= ((most - overall).exp() / total)[:, None]
        ctx.save_for_backward(exponentials, own, is_own, target != ignore_index)
        ctx.dtype = x.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dloss: Tensor) -> Any:
        softmax, own, is_own, counts = ctx.saved_tensors
        scale = dloss[0] * counts
        dx = softmax * scale[:, None]
        dx.scatter_add_(1, own.where(is_own, 0)[:, None], -(scale * is_own)[:, None])
        return dx.to(ctx.dtype), None, None, None, None
