"""Attention of a block of queries to a block of keys, as one part of a softmax over more keys.

| block    | its queries see       | computed by                                                        |
|----------|-----------------------|--------------------------------------------------------------------|
| EMPTY    | no key                | skipped                                                            |
| FULL     | all of its keys       | torch's flash attention if it takes the device and the dtype       |
| DIAGONAL | keys up to themselves | the same                                                           |
| PARTIAL  | keys of a mask        | the formula, some queries at a time, so that few scores exist      |

Forward returns the output of each query over these keys alone, and log(sum(exp(scores))). Backward takes the output and
that logarithm over all keys. With them P = exp(scores - lse) is the softmax over all keys, so the gradients of blocks
add up.
Source: FlashAttention-2, arXiv 2307.08691, sections 2.3 and 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from .sequence_data import AttentionContext

_MOST_SCORES = {"cpu": 1 << 20}  # at a time, in the formula
_MOST_SCORES_ELSEWHERE = 1 << 24
# As in `randomness.py`: it spreads the position of a chunk over the bits of its seed.
_MIX = 0x9E3779B97F4A7C15
_FLASH_DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}


class Kind(Enum):
    """The kinds of a block, in the table at the top of the file."""

    EMPTY = auto()
    FULL = auto()
    DIAGONAL = auto()
    PARTIAL = auto()


@dataclass(frozen=True)
class Seen:
    """The keys that a token may look at. window: how many tokens up to itself; None: all."""

    whole: AttentionContext
    is_causal: bool
    window: int | None

    def kind(self, queries: range, keys: range) -> Kind:
        """Return the kind of a block."""
        first, last = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start  # least and largest distance
        # Padding is at the end, so a causal mask hides it from all tokens before it.
        length = keys.stop if self.whole.length is None or self.is_causal else self.whole.length
        if (self.is_causal and last < 0) or (self.window is not None and first >= self.window) or keys.start >= length:
            return Kind.EMPTY
        if (by_values := self._by_values(queries, keys)) is not Kind.FULL:
            return by_values
        if keys.stop > length or (self.window is not None and last >= self.window):
            return Kind.PARTIAL
        if not self.is_causal or first >= 0:
            return Kind.FULL
        # torch's causal mask begins at the first query and the first key, so both must be the same tokens.
        return Kind.DIAGONAL if queries == keys else Kind.PARTIAL

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return (rows or 1, queries, keys) bool, True if a query may look at a key."""
        return self.whole.mask(queries, keys, self.is_causal, self.window, device)

    def _by_values(self, queries: range, keys: range) -> Kind:
        """Return EMPTY, PARTIAL or FULL, from padding and packed sequences."""
        kinds = []
        if (padding := self.whole.keys) is not None:
            kinds.append(_of_padding(padding[:, keys.start : keys.stop]))
        if (packed := self.whole.packed) is not None:
            kinds.append(_of_packed(packed[:, queries.start : queries.stop], packed[:, keys.start : keys.stop]))
        return next((kind for kind in (Kind.EMPTY, Kind.PARTIAL) if kind in kinds), Kind.FULL)


def _of_padding(keys: Tensor) -> Kind:
    """keys: (rows, keys) bool. A device tensor counts as PARTIAL, since reading it would wait for the device."""
    if keys.device.type != "cpu":
        return Kind.PARTIAL
    return Kind.FULL if bool(keys.all()) else Kind.PARTIAL if bool(keys.any()) else Kind.EMPTY


def _of_packed(queries: Tensor, keys: Tensor) -> Kind:
    """Sequence numbers grow along a row, except in the padding behind it. A device tensor counts as PARTIAL."""
    if keys.device.type != "cpu":
        return Kind.PARTIAL
    if bool((keys.amax(1) < queries.amin(1)).all()):
        return Kind.EMPTY
    # Keys of later sequences are not looked for: with a causal mask such a block is EMPTY already.
    first = keys[:, :1]
    return Kind.FULL if bool((keys == first).all() and (queries == first).all()) else Kind.PARTIAL


@dataclass(frozen=True)
class Scores:
    """Computes attention of a block with this scale, mask and dropout of its scores. seed: of dropout.

    device: the type whose kernels are used; None: that of the tensors.
    """

    seen: Seen
    scale: float
    dropout: float = 0.0
    seed: int = 0
    device: str | None = None

    def device_of(self, query: Tensor) -> str:
        """Return the device type whose kernels are used."""
        return self.device or query.device.type

    def forward(
        self,
        query: Tensor,  # (rows, heads, queries, size)
        key: Tensor,  # (rows, heads of keys, keys, size)
        value: Tensor,
        queries: range,  # token numbers
        keys: range,
    ) -> tuple[Tensor, Tensor] | None:
        """Return output (rows, heads, queries, value size) and lse (rows, heads, queries), or None for an EMPTY block.

        lse has at least 32 bits.
        """
        kind = self.seen.kind(queries, keys)
        if kind is Kind.EMPTY:
            return None
        if self._is_fast(kind, query, value):
            return self._flash(kind, query, key, value)
        wide = accumulated(query.dtype)
        out = query.new_empty(*query.shape[:3], value.shape[3], dtype=wide)
        lse = query.new_empty(query.shape[:3], dtype=wide)
        key, value = key.to(wide), value.to(wide)
        for part, scores, kept in self._chunks(kind, query, key, queries, keys):
            own = scores.logsumexp(-1)
            weights = _weights(scores, own)
            if kept is not None:
                weights = weights.mul_(kept)
            _chunk(out, part, key.shape[1]).copy_(_unfolded(weights @ value, out, part, key.shape[1]))
            lse[:, :, part] = own.view(*lse.shape[:2], -1)
        return out, lse

    def backward(
        self,
        grad: Tensor,  # of the output, in the shape of `query`
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,  # over all keys, in the shape of `query`
        lse: Tensor,  # (rows, heads, queries), over all keys
        queries: range,
        keys: range,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return this block's terms of the gradients of query, key and value, in any dtype; None for an EMPTY block."""
        kind = self.seen.kind(queries, keys)
        if kind is Kind.EMPTY:
            return None
        if self._is_fast(kind, query, value):
            return self._flash_backward(kind, grad, query, key, value, out, lse)
        wide, heads = accumulated(query.dtype), key.shape[1]
        key, value = key.to(wide), value.to(wide)
        of_query = torch.empty(query.shape, dtype=wide, device=query.device)
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        for part, scores, kept in self._chunks(kind, query, key, queries, keys):
            given, had = _folded(grad, part, heads).to(wide), _folded(out, part, heads).to(wide)
            weights = _weights(scores, _chunk(lse[..., None], part, heads).reshape(*scores.shape[:3]))
            of_weights = given @ value.transpose(-1, -2)
            if kept is None:
                of_value += weights.transpose(-1, -2) @ given
            else:
                of_value += (weights * kept).transpose(-1, -2) @ given
                of_weights *= kept
            # The softmax subtracts the sum of dP x P over the keys of all blocks, which is dO . O of the query.
            of_weights -= (given * had).sum(-1, keepdim=True)
            of_scores = weights.mul_(of_weights).mul_(self.scale)
            _chunk(of_query, part, heads).copy_(_unfolded(of_scores @ key, of_query, part, heads))
            of_key += of_scores.transpose(-1, -2) @ _folded(query, part, heads).to(wide)
        return of_query, of_key, of_value

    def _chunks(
        self, kind: Kind, query: Tensor, key: Tensor, queries: range, keys: range
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield some queries at a time: their slice, their scores and the dropout factors of their weights.

        Scores: (rows, key heads, queries of all heads of a key, keys).
        """
        rows, heads, numel, _ = query.shape
        most = _MOST_SCORES.get(self.device_of(query), _MOST_SCORES_ELSEWHERE)
        step = max(1, most // (rows * heads * len(keys)))
        for start in range(0, numel, step):
            part = slice(start, min(start + step, numel))
            scores = _folded(query, part, key.shape[1]).to(key.dtype) @ key.transpose(-1, -2)
            scores *= self.scale
            if kind is not Kind.FULL:
                mask = self.seen.mask(queries[part], keys, query.device)[:, None, None]
                scores.view(rows, key.shape[1], -1, *mask.shape[-2:]).masked_fill_(~mask, -math.inf)
            yield part, scores, self._kept(scores, queries[part], keys)

    def _kept(self, scores: Tensor, queries: range, keys: range) -> Tensor | None:
        """Draw the dropout factors. Forward and backward have the same chunks, so they draw the same numbers."""
        if not self.dropout:
            return None
        generator = torch.Generator(scores.device)
        # + 1, so that the first query mixes too. The product may be longer than `manual_seed` takes.
        generator.manual_seed((self.seed ^ _MIX * (queries.start + 1) ^ keys.start << 32) & (1 << 63) - 1)
        drawn = torch.rand(scores.shape, generator=generator, device=scores.device)
        return (drawn >= self.dropout).to(scores.dtype).div_(1 - self.dropout)

    def _is_fast(self, kind: Kind, query: Tensor, value: Tensor) -> bool:
        device = self.device_of(query)
        return (
            # No PARTIAL: with a mask, the CPU kernel gives a query without keys the logarithm 0, not minus infinity.
            kind in (Kind.FULL, Kind.DIAGONAL)
            and not self.dropout
            and query.dtype in _FLASH_DTYPES.get(device, ())
            and query.shape[3] == value.shape[3]
            # limits of the CUDA kernel
            and (device == "cpu" or (query.shape[3] % 8 == 0 and query.shape[3] <= 256))
        )

    def _flash(self, kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        folded, key, value = _alike(kind, query, key, value)
        is_causal = kind is Kind.DIAGONAL
        if self.device_of(query) == "cpu":
            # Not `functional.scaled_dot_product_attention`, which does not return the logarithms.
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                folded, key, value, 0.0, is_causal, scale=self.scale
            )
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                folded, key, value, 0.0, is_causal, scale=self.scale
            )[:2]
        return out.reshape(query.shape), lse.reshape(query.shape[:3])

    def _flash_backward(
        self, kind: Kind, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, is_causal = key.shape[1], kind is Kind.DIAGONAL
        folded, key, value = _alike(kind, query, key, value)
        grad, out = grad.reshape(folded.shape), out.reshape(folded.shape)
        lse = lse.contiguous().view(folded.shape[:3])  # the device kernel ignores its strides
        if self.device_of(query) == "cpu":
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, folded, key, value, out, lse, 0.0, is_causal, scale=self.scale
            )
        else:
            # seed and offset of dropout: required, but not read without dropout
            random = [torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())]
            lengths = folded.shape[2], key.shape[2]
            found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, folded, key, value, out, lse, None, None, *lengths, 0.0, is_causal, *random,
                scale=self.scale,
            )  # fmt: skip
        of_query, *others = found
        # `_alike` may have repeated keys and values: gradients of the copies add up.
        of_key, of_value = (one.unflatten(1, (heads, -1)).sum(2) if one.shape[1] != heads else one for one in others)
        return of_query.reshape(query.shape), of_key, of_value


def no_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output over no keys, (rows, heads, queries, value size) in a wide dtype, and its lse."""
    wide = accumulated(query.dtype)
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
    return out, query.new_full(query.shape[:3], -math.inf, dtype=wide)


def add_outputs(out: Tensor, lse: Tensor, more: Tensor, lse_of_more: Tensor) -> None:
    """Add the outputs of the same queries over further keys to out, in place, and update its lse."""
    total = torch.logaddexp(lse, lse_of_more)
    # Both outputs are divided by their own sums of exponentials: weigh them by their parts of the total.
    had, added = (_weights(one[..., None], total) for one in (lse, lse_of_more))
    out.mul_(had).addcmul_(more.to(out.dtype), added)
    lse.copy_(total)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outputs and gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), and 0 for a query that sees no key."""
    # Minus infinity from minus infinity would be NaN.
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()


def _alike(kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with equal numbers of heads.

    In a FULL block, the queries of all heads of a key are joined to a sequence. Else keys and values are repeated.
    """
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    if groups == 1:
        return query, key, value
    if kind is Kind.FULL:
        return query.reshape(query.shape[0], heads, -1, query.shape[3]), key, value
    return query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def _chunk(x: Tensor, part: slice, heads: int) -> Tensor:
    """Return a view (rows, key heads, heads of each key, some queries, size)."""
    x = x[:, :, part]
    return x.view(x.shape[0], heads, -1, *x.shape[2:])


def _folded(x: Tensor, part: slice, heads: int) -> Tensor:
    """Return (rows, key heads, some queries of all heads of a key, size)."""
    return _chunk(x, part, heads).flatten(2, 3)


def _unfolded(x: Tensor, like: Tensor, part: slice, heads: int) -> Tensor:
    return x.view(_chunk(like, part, heads).shape)
