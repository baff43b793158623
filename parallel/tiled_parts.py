"""The cross-entropy of a head that ranks share, a tile of tokens at a time: no rank has its part of the logits either.

    forward   each tile: x = h w^T -> its largest, the sum of exponentials beside it, the target's     (tokens, 3)
              one gather of these three numbers -> loss, and lse = log sum_v exp x[t, v] of all ranks
    backward  each tile: x again, d = (exp(x - lse) - onehot(target)) dloss -> dh = d w, dw += d^T h

The gradient of a tile's logits needs what all ranks know, so it is made in the backward, by a second product; what is
exchanged is that of `_CrossEntropy` in `vocabulary.py`. dh is this rank's part, which is summed in front of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..comm import Exchange
from .tiled_logits import TiledLogits


def tiled_cross_entropy(
    logits: TiledLogits,  # (tokens, own), of which nobody has computed any
    target: Tensor,  # (tokens,)
    first: int,
    ignore_index: int,
    exchange: Exchange,
) -> Tensor:
    """(tokens,), 0 where the target is ignored. first: number of the first own logit of the vocabulary."""
    hidden, weight, bias = logits.hidden, logits.weight, logits.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    tile = logits.head.tile(hidden)
    found: Tensor = _TiledCrossEntropy.apply(hidden, weight, bias, target, first, ignore_index, exchange, tile)  # type: ignore[no-untyped-call]
    return found


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        first: int,
        ignore_index: int,
        exchange: Exchange,
        tile: int,
    ) -> Tensor:
        own = target - first
        counts = target != ignore_index
        is_own = (own >= 0) & (own < weight.shape[0]) & counts
        own = own.where(is_own, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        numbers = torch.empty(3, hidden.shape[0], dtype=wide, device=hidden.device)
        for part in _tiles(hidden.shape[0], tile):
            x = functional.linear(hidden[part], weight, bias).to(wide)
            numbers[0, part] = x.amax(dim=1)
            numbers[2, part] = x.gather(1, own[part, None])[:, 0].where(is_own[part], 0)
            numbers[1, part] = x.sub_(numbers[0, part, None]).exp_().sum(dim=1)
            del x
        parts = exchange.gather(numbers[None], 0, "the loss of logits")
        overall = parts[:, 0].amax(dim=0)
        lse = overall + (parts[:, 1] * (parts[:, 0] - overall).exp()).sum(dim=0).log()
        ctx.save_for_backward(hidden, weight, bias, own, is_own, counts, lse)
        ctx.tile = tile
        return (lse - parts[:, 2].sum(dim=0)).where(counts, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, bias, own, is_own, counts, lse = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale = dloss * counts
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if needs_weight else None
        dbias = torch.zeros(weight.shape[0], dtype=lse.dtype, device=weight.device) if needs_bias else None
        for part in _tiles(hidden.shape[0], ctx.tile):
            d = functional.linear(hidden[part], weight, bias).to(lse.dtype)
            d.sub_(lse[part, None]).exp_().mul_(scale[part, None])
            d.scatter_add_(1, own[part, None], -(scale[part] * is_own[part])[:, None])
            if dbias is not None:
                dbias += d.sum(dim=0)
            d = d.to(hidden.dtype)
            if dhidden is not None:
                torch.mm(d, weight, out=dhidden[part])
            if dweight is not None:
                _add_product(dweight, d.t(), hidden[part])
            del d
        dweight = None if dweight is None else dweight.to(weight.dtype)
        dbias = None if dbias is None or bias is None else dbias.to(bias.dtype)
        return dhidden, dweight, dbias, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the dtype of total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _tiles(count: int, tile: int) -> Iterator[slice]:
    """Of about one size."""
    size = -(-count // max(-(-count // tile), 1))
    return (slice(at, at + size) for at in range(0, count, size)) if count else iter(())
