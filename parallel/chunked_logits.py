"""Logits that are not computed until a loss or another function needs them.

    hidden (..., n) -> head -> ChunkedLogits (..., vocabulary) -> views, float() -> cross_entropy -> loss
                               keeps hidden and weight          act on hidden     linear_cross_entropy, in tiles

[Note: lazy functions] A view of the logits that keeps the vocabulary whole equals the head of the same view of
`hidden`, so it stays lazy: shifting, flattening, masking, widening. `functional.cross_entropy` of class indices, called
by a Hugging Face model or by the user, is then computed from the head's weight, a tile of tokens at a time. Any other
function gets computed logits with their graph, and a warning names the function. A change in place is refused, since it
would be lost. Code below Python's functions (an autograd.Function on logits) gets the same values and gradients from
`__torch_dispatch__` and `_Logits`.

[Note: tiles of a split head]
With a vocabulary that is split over ranks, no rank holds its part of the logits either:

    forward   each tile: x = h w^T -> maximum, sum of exponentials relative to it, the target's logit   (tokens, 3)
              a gather of these three numbers -> loss, and lse = log sum_v exp x[t, v] of all ranks
    backward  each tile: x again, d = (exp(x - lse) - onehot(target)) dloss -> dh = d w, dw += d^T h

The gradient of a tile's logits needs lse of all ranks, so the backward computes it, with a second product. dh is a term
of a sum over the ranks; the head's input sums it. Logits that the head has computed are a single tile, with x = h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ..comm import Collectives
from ..kernels.cross_entropy import cross_entropy as fused_cross_entropy
from ..kernels.dispatch import Backend, has_autocast, once_differentiable, product_dtype
from ..kernels.linear_cross_entropy import add_product_, linear_cross_entropy
from ..model.compiled import untraced
from ..model.patches import ModelPatches
from .tiled_mlp import even_tiles, tile_of

Warn = Callable[[str], None]
"""Takes a warning, once for each function that needs computed logits."""


class ChunkedHead:
    """Replaces a linear layer's forward: more tokens than a tile give `ChunkedLogits`."""

    def __init__(
        self, name: str, head: nn.Linear, tokens: int | None, backend: Backend, patches: ModelPatches, warn: Warn
    ) -> None:
        """tokens: of a tile; None: the width of hidden, at least MIN_TILE. backend: of the loss."""
        self.name, self.backend = name, backend
        self._tokens = tokens
        self._warn = warn
        self._warned = set[str]()
        patches.override(head, "forward", untraced(partial(self._forward, head, head.forward)))

    def _forward(self, head: nn.Linear, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs:
            return inner(*args, **kwargs)
        (hidden,) = args
        # The logits of a single tile would exist as a whole in any case.
        if hidden.numel() // hidden.shape[-1] <= self.tile(hidden):
            return inner(hidden)
        weight: Tensor = head.weight
        bias: Tensor | None = head.bias
        if not torch.is_grad_enabled():
            # A ZeRO unit may release them before the loss reads them. The copy is smaller than the logits.
            weight, bias = weight.clone(), None if bias is None else bias.clone()
        return logits_of(self, hidden, weight, bias, product_dtype(hidden))

    def tile(self, hidden: Tensor) -> int:
        return self._tokens or tile_of(hidden.shape[-1])

    def warn(self, function: str) -> None:
        if function not in self._warned:
            self._warned.add(function)
            self._warn(
                f"tiles.loss: {function} reads the logits of '{self.name}', so they are made whole: only views of "
                "them, float() and cross_entropy of class indices are computed in tiles"
            )


class ChunkedLogits(Tensor):
    """hidden weight^T + bias, not computed. See the top of the file."""

    head: ChunkedHead
    hidden: Tensor  # (..., n)
    weight: Tensor  # (vocabulary, n)
    bias: Tensor | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        made: Any = NotImplemented
        if isinstance(first, ChunkedLogits):
            if func in _VIEWS:
                made = _viewed(first, func, args[1:], kwargs)
            elif func in _CASTS:
                made = _cast(first, func, args[1:], kwargs)
            elif func is Tensor.__getitem__:
                made = _indexed(first, args[1])
            elif func is fused_cross_entropy:
                made = _fused_loss(first, *args[1:], **kwargs)
        # Outside of the branch above, since the logits may be a keyword argument.
        if func is functional.cross_entropy:
            made = _loss(*args, **kwargs)
        if made is not NotImplemented:
            return made
        name = getattr(func, "__name__", str(func))
        if _is_in_place(name) and isinstance(first, ChunkedLogits):
            raise RuntimeError(
                f"tiles.loss: {name} changes the logits of '{first.head.name}' in place, but they are computed in "
                "tiles (ChunkedLogits); assign the result, as in logits = logits / 2, or set tiles.loss to 0"
            )
        made_of = partial(computed, function=name)
        return func(*tree_map(made_of, args), **tree_map(made_of, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with_values = partial(_values, function=str(func))
        return func(*tree_map(with_values, args), **tree_map(with_values, kwargs or {}))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkedLogits:
        """Return the logits of other tensors: `change` of hidden, weight and bias."""
        bias = None if self.bias is None else change(self.bias)
        return logits_of(self.head, change(self.hidden), change(self.weight), bias, self.dtype)

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return f"ChunkedLogits(of '{self.head.name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return cast(Tensor, _values(self, "deepcopy"))


def logits_of(
    head: ChunkedHead, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> ChunkedLogits:
    """Return lazy logits. dtype: of the logits as a reader sees them; products are in the dtype of hidden."""
    made: ChunkedLogits = _Logits.apply(hidden, weight, bias, dtype)  # type: ignore[no-untyped-call]
    made.head, made.hidden, made.weight, made.bias = head, hidden, weight, bias
    return made


class _Logits(torch.autograd.Function):
    """The graph of logits that code below Python's functions reads."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        # Zeros in the place of a missing gradient would have the size of all logits.
        ctx.set_materialize_grads(False)
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: Tensor = ChunkedLogits._make_wrapper_subclass(ChunkedLogits, shape, dtype=dtype, device=hidden.device)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogits: Tensor | None) -> tuple[Tensor | None, ...]:
        if dlogits is None:
            return None, None, None, None
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = dlogits.reshape(-1, dlogits.shape[-1]).to(hidden.dtype)
        dhidden = (rows @ weight.to(rows.dtype)).view(hidden.shape) if needs_hidden else None
        dweight = (rows.t() @ hidden.reshape(-1, hidden.shape[-1])).to(weight.dtype) if needs_weight else None
        return dhidden, dweight, rows.sum(0) if needs_bias else None, None


# -- lazy functions -----------------------------------------------------------------------------------------------


def _again(logits: ChunkedLogits, hidden: Tensor, dtype: torch.dtype | None = None) -> ChunkedLogits:
    return logits_of(logits.head, hidden, logits.weight, logits.bias, dtype or logits.dtype)


def _viewed(logits: ChunkedLogits, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a view whose last dimension is the vocabulary, else NotImplemented. Tokens keep their order."""
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return _again(logits, logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]))


def _cast(logits: ChunkedLogits, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Cast to float32 or to the present dtype, else return NotImplemented."""
    wanted = torch.float32 if func is Tensor.float else logits.dtype
    for value in (*args, *kwargs.values()) if func is Tensor.to else ():
        if isinstance(value, torch.dtype):
            wanted = value
        elif not isinstance(value, (str, torch.device)) or torch.device(value) != logits.device:
            return NotImplemented
    # The loss computes in these dtypes in any case. A cast to another dtype changes values.
    if wanted not in (logits.dtype, torch.promote_types(logits.dtype, torch.float32)):
        return NotImplemented
    return logits if wanted == logits.dtype else _again(logits, logits.hidden, wanted)


def _indexed(logits: ChunkedLogits, index: Any) -> Any:
    """Choose tokens by slices and numbers, or by one tensor, else return NotImplemented."""
    dims = logits.dim() - 1
    if isinstance(index, Tensor):
        # A mask indexes as many dimensions as it has, a tensor of numbers the first. The vocabulary is the last.
        covers = index.dim() if index.dtype == torch.bool else 1
        return _again(logits, logits.hidden[index]) if covers <= dims else NotImplemented
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(one is Ellipsis or one is None or isinstance(one, (int, slice)) for one in entries):
        return NotImplemented
    # torch takes a bool as a mask that adds a dimension, but Python counts it as an int.
    if entries.count(Ellipsis) > 1 or any(isinstance(one, bool) for one in entries):
        return NotImplemented
    missing = logits.dim() - sum(1 for one in entries if one is not None and one is not Ellipsis)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = [slice(None)] * missing
    if missing < 0 or entries[-1] != slice(None):
        return NotImplemented
    return _again(logits, logits.hidden[tuple(entries)])


def _loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute `functional.cross_entropy` of class indices without class weights, else return NotImplemented."""
    if not isinstance(input, ChunkedLogits) or input.dim() != 2 or target.shape != input.shape[:1]:
        return NotImplemented
    is_plain = weight is None and size_average is None and reduce is None
    if not is_plain or target.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    loss = _fused_loss(
        input, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, backend="auto"
    )
    # torch's cross-entropy gives float32 under autocast, else the dtype of the logits.
    return loss if has_autocast(input) else loss.to(input.dtype)


def _fused_loss(logits: ChunkedLogits, labels: Tensor, **options: Any) -> Any:
    """Compute `kernels.cross_entropy` from the head's weight."""
    hidden, weight = logits.hidden, logits.weight
    # The kernel pads the rows of its buffer to 16 columns, so `chunk_bytes` below are those of a tile.
    columns = -(-weight.shape[0] // 16) * 16
    product = product_dtype(hidden)
    # There are no logits that the loss could overwrite.
    options.pop("overwrite_logits", None)
    if options.get("backend", "auto") == "auto":
        options["backend"] = logits.head.backend
    return linear_cross_entropy(
        hidden,
        weight,
        labels,
        logits.bias,
        chunk_bytes=logits.head.tile(hidden) * columns * product.itemsize,
        **options,
    )


# -- functions that need values -----------------------------------------------------------------------------------


def computed(value: Any, function: str) -> Any:
    """Compute a lazy value, with its graph. function: the function that needs it."""
    if not isinstance(value, ChunkedLogits):
        return value
    value.head.warn(function)
    return functional.linear(value.hidden, value.weight, value.bias).to(value.dtype)


def _values(value: Any, function: str) -> Any:
    """Do `computed` without a graph."""
    with torch.no_grad():
        return computed(value, function)


def _is_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED


_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "and", "or", "xor")}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten}
_CASTS = {Tensor.float, Tensor.to, Tensor.contiguous}
_ATTRIBUTES = """
    shape dtype device requires_grad grad is_leaf grad_fn ndim layout is_cuda is_sparse is_meta is_quantized is_cpu
    itemsize nbytes is_nested _version _backward_hooks _post_accumulate_grad_hooks output_nr retains_grad
"""
_HARMLESS = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.__hash__,
    Tensor.get_device,
    Tensor.is_contiguous,
    Tensor.stride,
    torch.is_tensor,
    torch.is_floating_point,
    torch.numel,
}


def split_cross_entropy(
    logits: Tensor,  # (tokens, local vocabulary), lazy or not
    target: Tensor,  # (tokens,)
    first: int,
    ignore_index: int,
    exchange: Collectives,
) -> Tensor:
    """Return (tokens,) losses, 0 for an ignored target. first: index of the first local logit in the vocabulary.

    See [Note: tiles of a split head].
    """
    hidden, weight, bias, tile = logits, None, None, max(1, logits.shape[0])
    if isinstance(logits, ChunkedLogits):
        hidden, weight, bias, tile = logits.hidden, logits.weight, logits.bias, logits.head.tile(logits.hidden)
        # By hand: the backward of an autograd.Function runs without autocast, and must make the same products.
        if has_autocast(hidden):
            dtype = product_dtype(hidden)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
    found: Tensor = _SplitCrossEntropy.apply(hidden, weight, bias, target, first, ignore_index, exchange, tile)  # type: ignore[no-untyped-call]
    return found


def _logits_to_change(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the logits of a tile, in memory of their own. weight: None if `hidden` are the logits."""
    return hidden.to(dtype, copy=True) if weight is None else functional.linear(hidden, weight, bias).to(dtype)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        first: int,
        ignore_index: int,
        exchange: Collectives,
        tile: int,
    ) -> Tensor:
        own = target - first
        counts = target != ignore_index
        is_own = (own >= 0) & (own < (hidden.shape[1] if weight is None else weight.shape[0])) & counts
        own = own.where(is_own, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        numbers = torch.empty(3, hidden.shape[0], dtype=wide, device=hidden.device)
        for part in even_tiles(hidden.shape[0], tile):
            x = _logits_to_change(hidden[part], weight, bias, wide)
            numbers[0, part] = x.amax(dim=1)
            # Before the exponentials, which overwrite x.
            numbers[2, part] = x.gather(1, own[part, None])[:, 0].where(is_own[part], 0)
            numbers[1, part] = x.sub_(numbers[0, part, None]).exp_().sum(dim=1)
            del x  # else two tiles would exist during the next product
        # All ranks of the axis gather, also a rank without a target.
        parts = exchange.gather(numbers[None], 0, "the loss of logits")
        overall = parts[:, 0].amax(dim=0)
        lse = overall + (parts[:, 1] * (parts[:, 0] - overall).exp()).sum(dim=0).log()
        ctx.save_for_backward(hidden, weight, bias, own, is_own, counts, lse)
        ctx.tile = tile
        return (lse - parts[:, 2].sum(dim=0)).where(counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, bias, own, is_own, counts, lse = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale = dloss * counts
        dhidden = torch.empty_like(hidden) if needs_hidden and weight is not None else None
        dweight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if needs_weight else None
        dbias = torch.zeros(weight.shape[0], dtype=lse.dtype, device=weight.device) if needs_bias else None
        for part in even_tiles(hidden.shape[0], ctx.tile):
            d = _logits_to_change(hidden[part], weight, bias, lse.dtype)
            d.sub_(lse[part, None]).exp_().mul_(scale[part, None])
            d.scatter_add_(1, own[part, None], -(scale[part] * is_own[part])[:, None])
            if dbias is not None:
                dbias += d.sum(dim=0)
            d = d.to(hidden.dtype)
            if weight is None:
                dhidden = d
            elif dhidden is not None:
                torch.mm(d, weight, out=dhidden[part])
            if dweight is not None:
                add_product_(dweight, d, hidden[part])
            del d
        dweight = None if dweight is None else dweight.to(weight.dtype)
        dbias = None if dbias is None or bias is None else dbias.to(bias.dtype)
        return dhidden, dweight, dbias, None, None, None, None, None
