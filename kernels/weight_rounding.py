"""Store updated float32 weights in bfloat16 without a float32 copy: random rounding (`Rounding`), or a remainder.

[Note: Numbered draws]
A weight is rounded up or down at random, with probabilities that make the mean exact. Rounding to nearest would lose
an update below 2^-9 of the weight in every step. The error of a step is not stored; over many steps it averages out.
Source: arXiv 2502.20566.

The random bits of an element are a hash of its number (below 2^64), the step and the training's seed, and of nothing
else. So all replicas draw the same bits, on every device, with every kernel, for every division into shards. An
element's number is the hash of the name of its flat group, plus its offset in the flat buffer, which does not depend on
the number of shards. The hash is a permutation of 32 bits: two rounds of MurmurHash3's mixing, each after a word of a
64-bit key, which SplitMix64 makes from seed and step. A test with 10,000 draws finds no dependence between neighbouring
elements, or between successive steps of an element.

The weight uses the upper 16 of the 32 bits, the first state the lower 16, and the second state derived bits.

[Note: Remainders]
A second bfloat16 stores the difference between a weight and its nearest bfloat16, without random bits. The sum of both
has about 16 bits of mantissa. An update below 2^-18 of the weight is lost. Sources: Kahan, CACM 8(1), 1965;
arXiv 2010.06192, section 4.2.

[Note: Split weights]
A weight of 24 bits, a float32 without its last 8 bits, is stored in two parts: the nearest bfloat16, which is used in
computations, and the difference of the bits as a signed byte. The bits of floats have the order of their magnitudes, so
integer additions split and join the parts, equally at every exponent, and a weight has a unique form:

    24 bits   s eeeeeeee mmmmmmm cccccccc        weight = 256 bfloat16 + byte,  -128 <= byte <= 127

The last 8 bits of the float32 are rounded at random by the upper 8 bits of the element's draw, so that the mean of a
small update is exact. FlashOptim (arXiv 2602.23349, section 3.1) stores the byte as a fraction of half a unit in the
last place, rounded to nearest.
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
    """Random rounding of a shard's bfloat16 weights. See [Note: Numbered draws]."""

    seed: int  # of the training
    first: int  # number of the first element, below 2^64

    @classmethod
    def of(cls, seed: int, name: str, offset_in_flat: int) -> Rounding:
        """Make the rounding of a shard. name: of the flat group, equal on all ranks."""
        start = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        return cls(seed, start + offset_in_flat & _LONG)

    def at(self, offset: int) -> Rounding:
        """Return the rounding of a part of the shard that begins `offset` elements later."""
        return Rounding(self.seed, self.first + offset & _LONG)

    def noise(self, numel: int, step: int, device: torch.device) -> Tensor:
        """Draw random bits for each element, (numel,) int32. The C++ and the Triton kernel have the same function."""
        numbers = torch.arange(numel, device=device) + signed_long(self.first)
        low_key, high_key = (signed_word(word) for word in step_key(self.seed, step))
        # A cast to int32 keeps the low 32 bits.
        low, high = numbers.to(torch.int32), (numbers >> 32).to(torch.int32)
        return mixed(mixed(low + low_key) ^ (high + high_key))


@lru_cache(maxsize=16)
def step_key(seed: int, step: int) -> tuple[int, int]:
    """Return the two words of a step's key, below 2^32 each."""
    key = _split_mix(_split_mix(seed & _LONG) ^ step)
    return key & _WORD, key >> 32


def rounded_weights(values: Tensor, noise: Tensor) -> Tensor:
    """Round values, (n,) float32, to bfloat16 by the upper half of the noise, (n,) int32. Returns (n,) float32."""
    return rounded_at_random(values, noise >> 16)


def split_weights(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Split values, (n,) float32, into bfloat16, (n,), and byte, (n,) int8. See [Note: Split weights].

    noise: (n,) int32 random bits.
    """
    # The mask: the shift of a signed integer is arithmetic. The sum rounds up by a carry into the kept bits.
    drawn = values.view(torch.int32) + (noise >> 24 & 0xFF) & ~0xFF
    # Half up, not to even: so the byte is at most 127, and a weight has a unique form.
    nearest = (drawn + 0x8000) >> 16
    rest = (drawn >> 8) - (nearest << 8)
    is_nan = values.isnan()  # a carry could make any bits of it, such as -0.0
    nearest, rest = nearest.masked_fill(is_nan, 0x7FC0), rest.masked_fill(is_nan, 0)
    return nearest.to(torch.int16).view(torch.bfloat16), rest.to(torch.int8)


def with_remainder(master: Tensor, remainder: Tensor) -> Tensor:
    """Join master, (n,) bfloat16, and remainder, (n,) bfloat16, or int8 of split weights, to (n,) float32."""
    if remainder.dtype != torch.int8:
        return master.float() + remainder
    return ((master.view(torch.int16).int() << 16) + (remainder.int() << 8)).view(torch.float32)


def signed_long(number: int) -> int:
    """Return the int64 with the bits of a number below 2^64."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _split_mix(x: int) -> int:
    # SplitMix64's constants. Python adds before it masks.
    x = x + 0x9E3779B97F4A7C15 & _LONG
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _LONG
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _LONG
    return x ^ x >> 31
