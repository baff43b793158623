"""Weights of bfloat16 that are the only copy: how a weight and its update, summed in float32, are kept in 16 bits.

[Note: Numbered draws]
A weight is rounded up or down at random, with the probability that makes the mean exact: to the nearest, an update
below 2^-9 of the weight would be lost in every step. What one step rounds away is not remembered, but over the steps it
averages out. Source: arXiv 2502.20566.

The random bits of an element are those of its number, below 2^64, in a step: a hash of both and of the training's seed,
and of nothing else. So all ranks that have a copy of it draw the same, and so does whoever computes it, whatever it is
computed with and wherever the shard is cut. A number is that of the unit's group, from its name, and of the element in
the group's flat buffer, which does not depend on the number of shards. The hash is a permutation of 32 bits, with two
rounds of MurmurHash3's mixing, each after a word of a key of 64 bits, which SplitMix64 makes of seed and step. Elements
next to each other, and one element in successive steps, are as independent as a test of 10,000 draws can see.

The weight is rounded with the upper 16 of its 32 bits, the first state with the lower ones, the second with others.

[Note: Remainders]
With a second number of bfloat16 for each weight, what the nearest bfloat16 lacks, nothing is drawn: the two stand for
their sum, which has some 16 bits of mantissa. An update below 2^-18 of the weight is lost. Sources: Kahan, CACM 8(1),
1965; arXiv 2010.06192, section 4.2.

[Note: Split weights]
A weight of 24 bits, a float32 without its last 8, lies in two places: the nearest bfloat16, which is computed with, and
what its bits lack, as a signed byte. Bits of floats are ordered as their magnitudes are, so both parts are found and
put together by adding integers, at every exponent alike, and a weight has one form:

    24 bits   s eeeeeeee mmmmmmm cccccccc        weight = 256 bfloat16 + byte,  -128 <= byte <= 127

The 8 bits of the float32 that have no place are rounded at random by the upper 8 bits of the element's draw, so that a
small update is right in the mean. FlashOptim (arXiv 2602.23349, section 3.1) keeps the byte as a fraction of half a
unit in the last place, to the nearest.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from .optimizer_states import mixed, rounded_at_random, signed_word

_WORD = (1 << 32) - 1
_LONG = (1 << 64) - 1


class Rounding(NamedTuple):
    """What the weights of a shard, all bfloat16, are rounded with; see [Note: Numbered draws]."""

    seed: int  # of the training
    first: int  # the number of the first element, below 2^64

    @classmethod
    def of(cls, seed: int, name: str, offset_in_flat: int) -> Rounding:
        """name: of the group, the same on all ranks."""
        start = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        return cls(seed, start + offset_in_flat & _LONG)

    def at(self, offset: int) -> Rounding:
        """That of a part of the shard which begins `offset` elements later."""
        return Rounding(self.seed, self.first + offset & _LONG)

    def noise(self, numel: int, step: int, device: torch.device) -> Tensor:
        """Random bits of each element, (numel,) int32. The C++ and the Triton kernel have the same function."""
        numbers = torch.arange(numel, device=device) + signed_long(self.first)
        low_key, high_key = (signed_word(word) for word in step_key(self.seed, step))
        low, high = numbers.to(torch.int32), (numbers >> 32).to(torch.int32)
        return mixed(mixed(low + low_key) ^ (high + high_key))


@lru_cache(maxsize=16)
def step_key(seed: int, step: int) -> tuple[int, int]:
    """The two words of a step's key, below 2^32 each."""
    key = _split_mix(_split_mix(seed & _LONG) ^ step)
    return key & _WORD, key >> 32


def rounded_weights(values: Tensor, noise: Tensor) -> Tensor:
    """values, (n,) float32, as values of bfloat16, (n,) float32, by the upper half of the noise, (n,) int32."""
    return rounded_at_random(values, noise >> 16)


def split_weights(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """values, (n,) float32 -> the nearest, (n,) bfloat16, and what it lacks, (n,) int8. See [Note: Split weights].

    noise: (n,) int32 random bits.
    """
    drawn = values.view(torch.int32) + (noise >> 24 & 0xFF) & ~0xFF
    nearest = (drawn + 0x8000) >> 16
    rest = (drawn >> 8) - (nearest << 8)
    is_nan = values.isnan()
    nearest, rest = nearest.masked_fill(is_nan, 0x7FC0), rest.masked_fill(is_nan, 0)
    return nearest.to(torch.int16).view(torch.bfloat16), rest.to(torch.int8)


def with_remainder(master: Tensor, remainder: Tensor) -> Tensor:
    """What both stand for, (n,) float32. master: (n,) bfloat16; remainder: (n,) bfloat16, or int8 of split weights."""
    if remainder.dtype != torch.int8:
        return master.float() + remainder
    return ((master.view(torch.int16).int() << 16) + (remainder.int() << 8)).view(torch.float32)


def signed_long(number: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _split_mix(x: int) -> int:
    x = x + 0x9E3779B97F4A7C15 & _LONG
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _LONG
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _LONG
    return x ^ x >> 31
