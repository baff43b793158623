"""Attention over a sequence that is split over ranks: queries stay, keys and values go round the ranks (a ring).

    hop 0   rank 0: q0 k0    rank 1: q1 k1    rank 2: q2 k2      the rank's local keys and values
    hop 1   rank 0: q0 k2    rank 1: q1 k0    rank 2: q2 k1      those of the rank before; the next are in flight
    hop 2   rank 0: q0 k1    rank 1: q1 k2    rank 2: q2 k0

The logarithms of the sums combine the parts of a softmax, in at least float32. A backward is a second round: it
recomputes the blocks, and gradients of keys and values travel with them, then home from the last hop.
Source: Ring Attention, arXiv 2310.01889, section 3.

[Note: balanced halves]
With a causal mask rank r would have r blocks to compute beside its diagonal, and the last rank all of them. So a rank
takes the halves r and 2 x ranks - 1 - r of the sequence. Each hop but the first is then half a block on every rank. The
model splits tokens in order, so queries, keys, values and outputs are exchanged here.
Source: the zigzag of Llama 3's context parallelism, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Collectives
from .block_attention import Scores, Seen, accumulated, add_outputs, no_outputs

_KEYS = "keys and values of attention round a ring"
_GRADIENTS = "the gradients of keys and values of attention round a ring"
_HALVES = "halves of attention over a ring"


@dataclass(frozen=True)
class Ring:
    """The ranks at distance `stride`, each with a part of equal length."""

    exchange: Collectives
    stride: int
    tokens: int  # in a part
    seen: Seen

    @property
    def size(self) -> int:
        return self.exchange.size // self.stride

    @property
    def place(self) -> int:
        return self.exchange.place // self.stride

    @property
    def hops(self) -> int:
        """Number of hops. With a window, keys need not reach all ranks."""
        window = self.seen.window
        if not self.seen.is_causal or window is None:
            return self.size - 1
        # A query sees itself and window - 1 tokens before it.
        return min(self.size - 1, max(0, -(-(window - 1) // self.tokens)))

    @property
    def is_balanced(self) -> bool:
        """See [Note: balanced halves]. If fewer hops suffice, all ranks have equal work anyway."""
        return self.seen.is_causal and self.hops == self.size - 1 > 0 and self.tokens % 2 == 0

    def spans(self, place: int) -> list[range]:
        """Return the tokens of the rank at `place`, as consecutive spans."""
        if not self.is_balanced:
            return [range(place * self.tokens, (place + 1) * self.tokens)]
        half = self.tokens // 2
        return [range(number * half, (number + 1) * half) for number in self._halves(place)]

    def to_balanced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange (rows, heads, part, size) tensors of one dtype from sequence order to the order of `spans`."""
        if not self.is_balanced:
            return list(tensors)
        to = [self._owner(2 * self.place + half) for half in range(2)]
        return self._traded(tensors, to, [divmod(number, 2) for number in self._halves(self.place)])

    def from_balanced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange back to sequence order."""
        if not self.is_balanced:
            return list(tensors)
        numbers = [2 * self.place + half for half in range(2)]
        # A rank's first half is among the first `size` halves of the sequence, and its second half is not.
        of = [(self._owner(number), int(number >= self.size)) for number in numbers]
        return self._traded(tensors, [number // 2 for number in self._halves(self.place)], of)

    def next(self, x: Tensor, by: int, what: str) -> Any:
        """Start to send x `by` places on, and to receive."""
        return self.exchange.shift(x, by * self.stride, what)

    def _halves(self, place: int) -> tuple[int, int]:
        return place, 2 * self.size - 1 - place

    def _owner(self, half: int) -> int:
        return min(half, 2 * self.size - 1 - half)

    def _traded(self, tensors: Sequence[Tensor], to: Sequence[int], of: Sequence[tuple[int, int]]) -> list[Tensor]:
        # (2, rows, heads, half, size)
        halves = [one.view(*one.shape[:2], 2, -1, one.shape[3]).movedim(2, 0) for one in tensors]
        pieces = torch.cat([one.flatten(1) for one in halves], dim=1)
        # Ranks with this remainder have the same heads, and so form a ring.
        beside = self.exchange.place % self.stride
        at = [place * self.stride + beside for place in to]
        sources = [(place * self.stride + beside, piece) for place, piece in of]
        got = self.exchange.trade(pieces, at, sources, _HALVES)()
        parts = torch.split(got, [one[0].numel() for one in halves], dim=1)
        return [part.view(one.shape).movedim(0, 2).flatten(2, 3) for part, one in zip(parts, halves, strict=True)]


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, scores: Scores) -> Tensor:
    """Return attention of this rank's queries over the tokens of all ranks of the ring.

    query: (rows, heads, part, size); key, value: (rows, key heads, part, size), with key heads that divide heads ->
    (rows, heads, part, value size), in the dtype of query or autocast.
    """
    device = scores.device_of(query)
    if torch.is_autocast_enabled(device):
        query, key, value = (one.to(torch.get_autocast_dtype(device)) for one in (query, key, value))
        # Autocast would cast the wide sums of the formula back before each product.
        with torch.autocast(device, enabled=False):
            return ring_attention(query, key, value, ring, scores)
    return _RingAttention.apply(query, key, value, ring, scores)  # type: ignore[no-untyped-call, no-any-return]


class _RingAttention(torch.autograd.Function):
    """Saves the local queries, keys, values and outputs, and a number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scores: Scores) -> Tensor:
        query, key, value = ring.to_balanced([query, key, value])
        total, lse = no_outputs(query, value)
        blocks, shapes = _packed([key, value]), (key.shape, value.shape)
        # The blocks of the next hop are in flight while this hop computes.
        for hop in range(ring.hops + 1):
            arriving = ring.next(blocks, 1, _KEYS) if hop < ring.hops else None
            there, those = _unpacked(blocks, shapes)
            for part, queries, of, keys in _pairs(ring, hop):
                found = scores.forward(query[:, :, part], there[:, :, of], those[:, :, of], queries, keys)
                if found is not None:
                    add_outputs(total[:, :, part], lse[:, :, part], *found)
            if arriving is not None:
                blocks = arriving()
        out = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring, ctx.scores = ring, scores
        return ring.from_balanced([out])[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        ring, scores = ctx.ring, ctx.scores
        (grad,) = ring.to_balanced([grad])
        wide = accumulated(query.dtype)
        of_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        blocks, shapes = _packed([key, value]), (key.shape, value.shape)
        coming = None
        for hop in range(ring.hops + 1):
            arriving = ring.next(blocks, 1, _KEYS) if hop < ring.hops else None
            there, those = _unpacked(blocks, shapes)
            # A new tensor, since the sums of the hop before may still be on their way.
            summed = torch.zeros(blocks.shape, dtype=wide, device=blocks.device)
            of_key, of_value = _unpacked(summed, shapes)
            for part, queries, of, keys in _pairs(ring, hop):
                given = [one[:, :, part] for one in (grad, query)]
                found = scores.backward(
                    *given, there[:, :, of], those[:, :, of], out[:, :, part], lse[:, :, part], queries, keys
                )
                if found is not None:
                    of_query[:, :, part] += found[0]
                    of_key[:, :, of] += found[1]
                    of_value[:, :, of] += found[2]
            # Waits come in the order of the starts (`Collectives.trade`): the sums of a hop, then the keys of the next.
            # After the last hop the sums are `hops` places from the rank of their keys.
            if coming is not None:
                summed += coming()
            if ring.hops:
                coming = ring.next(summed, 1 if hop < ring.hops else -ring.hops, _GRADIENTS)
            if arriving is not None:
                blocks = arriving()
        if coming is not None:
            summed = coming()
        found = [one.to(query.dtype) for one in (of_query, *_unpacked(summed, shapes))]
        return *ring.from_balanced(found), None, None


def _pairs(ring: Ring, hop: int) -> list[tuple[slice, range, slice, range]]:
    """Pair this rank's spans with the spans that have arrived: each as (slice of the part, token numbers)."""
    own, others = (_slices(ring.spans(place)) for place in (ring.place, (ring.place - hop) % ring.size))
    return [(*mine, *theirs) for mine in own for theirs in others]


def _slices(spans: Sequence[range]) -> list[tuple[slice, range]]:
    found, start = [], 0
    for span in spans:
        found.append((slice(start, start + len(span)), span))
        start += len(span)
    return found


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate to a single message."""
    return torch.cat([one.flatten() for one in tensors])


def _unpacked(x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views."""
    parts = torch.split(x, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
