"""Optimizer states in float32, bfloat16 or blocks of 8-bit floats: their tensors, and their rounding in torch.

[Note: Narrow states]
Both narrow kinds round up or down at random, with probabilities that make the mean exact. Rounding to nearest loses
every change below half a step: with beta2 = 0.999 a second moment changes by 0.1 % in a step, and bfloat16 rounds to
0.2-0.4 %, so it could never decay. The random bits are a hash of the element's gradient, its weight and the step. They
do not depend on the element's position, so states have the same bits for every sharding of the model.
Sources: arXiv 2010.06192 (stochastic rounding in bfloat16), 2110.02861 (8-bit states by blocks).

[Note: 8-bit states]
A block of 256 elements has a scale, a power of two. Each element is an 8-bit float times the scale:

    int8   mean of gradients   sign, 4 bits of exponent, 3 of mantissa    down to 2^-17 of the scale, then 0
    uint8  mean of squares           5 bits of exponent, 3 of mantissa    down to 2^-33 of the scale; only 0 becomes 0

Steps between neighbours are 6-12 % of the value at every magnitude: Adam needs a small relative error of its divisor,
and an element with small gradients beside an element with large gradients keeps its moments. With scales that are
powers of two, an unchanged value is stored without error. If a second moment rounded to 0 beside a nonzero first
moment, the update would be huge (arXiv 2309.01507, section 4.1), so it stops at the smallest code. A block with a
magnitude of 2^126 or more, or with a NaN, has the scale NaN, and reads as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..optimizers.optimizer import Optimizer, Options, State

STATE_BLOCK_NUMEL = 256
SCALE_SUFFIX = ".scale"
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
_MANTISSA_SHIFT = 20  # position of the top 3 bits of a float32's mantissa


def new_states(
    optimizer: Optimizer, master: Tensor, options: Options, state_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Make the states before the first step, by name, in the order of `update_runs`.

    master: (n,). state_dtype: float32 (float64 if master is float64), bfloat16 or int8. With int8, a state is a
    payload, (n,) int8 or uint8, and "<name>.scale", (ceil(n / 256),) float32. Raises ValueError for any other dtype.
    """
    states: dict[str, Tensor] = {}
    for state in optimizer.states_for(options):
        states |= new_state(state, master, options, state_dtype)
    return states


def new_state(state: State, master: Tensor, options: Options, state_dtype: torch.dtype) -> dict[str, Tensor]:
    """Make a single state, as `new_states` does."""
    start = float(options[state.start_option]) if state.start_option else 0.0
    if state_dtype not in STATE_DTYPES:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        raise ValueError(f"state_dtype: expected {names}, found {state_dtype}")
    if state_dtype == torch.float32:
        return {state.name: torch.full_like(master, start, dtype=torch.promote_types(master.dtype, torch.float32))}
    if master.dtype == torch.float64:
        raise ValueError(
            f"state_dtype: expected float32 master weights for {state_dtype} states, found {master.dtype}; set "
            "state_dtype to float32"
        )
    if state_dtype == torch.bfloat16:
        return {state.name: torch.full_like(master, start, dtype=torch.bfloat16)}
    payload_dtype = torch.uint8 if state.is_mean_of_squares else torch.int8
    payload = torch.zeros_like(master, dtype=payload_dtype)
    scale = torch.ones(-(-master.numel() // STATE_BLOCK_NUMEL), dtype=torch.float32, device=master.device)
    if start:
        narrow_blocks(torch.full_like(master, start, dtype=torch.float32), None, payload, scale)
    return {state.name: payload, state.name + SCALE_SUFFIX: scale}


class StoredState(NamedTuple):
    """A stored state of a shard."""

    payload: Tensor  # (n,) float32 or float64, bfloat16, int8 or uint8
    scale: Tensor | None  # (ceil(n / 256),) float32, for int8 and uint8

    @property
    def is_narrow(self) -> bool:
        return self.payload.dtype in (torch.bfloat16, torch.int8, torch.uint8)

    def part(self, start: int, end: int) -> StoredState:
        """Return elements start to end. For 8-bit states, start is a multiple of 256."""
        if self.scale is None:
            return StoredState(self.payload[start:end], None)
        assert start % STATE_BLOCK_NUMEL == 0, start
        blocks = slice(start // STATE_BLOCK_NUMEL, -(-end // STATE_BLOCK_NUMEL))
        return StoredState(self.payload[start:end], self.scale[blocks])

    def widened(self) -> Tensor:
        """Return the values, (n,) float32: the stored tensor itself if it is wide."""
        if self.scale is not None:
            return widened_blocks(self.payload, self.scale)
        return self.payload.float() if self.is_narrow else self.payload

    def narrow(self, values: Tensor, noise: Tensor | None = None) -> None:
        """Store values, (n,) float32. noise: (n,) int32 random bits; None: round to nearest."""
        if self.scale is not None:
            narrow_blocks(values, noise, self.payload, self.scale)
        elif noise is None:
            self.payload.copy_(values)
        else:
            self.payload.copy_(rounded_at_random(values, noise))


def rounded_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """Round values, (n,) float32, to bfloat16 at random, so that the mean is exact. Returns (n,) float32.

    noise: (n,) int32 random bits. A value that is a bfloat16 does not change.
    """
    # The carry of the sum rounds up, with the probability that the lower half stands for. It would turn some NaN into
    # infinity or -0.0.
    rounded = (values.view(torch.int32) + (noise & 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isnan(), torch.nan, rounded)


def stored_states(tensors: Sequence[Tensor]) -> list[StoredState]:
    """Make states from the tensors of `new_states`, in their order: a scale follows its 8-bit payload."""
    states, rest = [], iter(tensors)
    for payload in rest:
        is_8_bit = payload.dtype in (torch.int8, torch.uint8)
        states.append(StoredState(payload, next(rest) if is_8_bit else None))
    return states


def widened_blocks(payload: Tensor, scale: Tensor) -> Tensor:
    """Decode 8-bit states to (n,) float32. See [Note: 8-bit states]."""
    code = payload.to(torch.int32)
    magnitude = code & (0x7F if payload.dtype == torch.int8 else 0xFF)
    top = _top_exponent(payload.dtype)
    subnormal = magnitude.float() * 2.0 ** (-2 - top)
    normal = ((magnitude + ((127 - top) << 3)) << _MANTISSA_SHIFT).view(torch.float32)
    values = torch.where(magnitude < 8, subnormal, normal)
    values *= scale.repeat_interleave(STATE_BLOCK_NUMEL)[: values.numel()]
    return torch.where(code < 0, -values, values)


def narrow_blocks(values: Tensor, noise: Tensor | None, payload: Tensor, scale: Tensor) -> None:
    """Encode values, (n,) float32, into payload and scale. noise: (n,) int32 random bits; None: round to nearest."""
    numel, num_blocks, device = values.numel(), scale.numel(), values.device
    blocks = torch.zeros(num_blocks * STATE_BLOCK_NUMEL, device=device)
    blocks[:numel] = values
    blocks = blocks.view(num_blocks, STATE_BLOCK_NUMEL)
    bits = blocks.view(torch.int32)
    # As bits of a float32: the scale is the power of two above the largest magnitude, so y is below 1.
    exponent = (bits & 0x7FFFFFFF).amax(1, keepdim=True) >> 23
    is_broken = exponent >= 253  # the inverse of the scale would be denormal
    # Keeps the shifts of broken blocks in range. Their codes and scale are overwritten below.
    exponent.clamp_(max=252)
    scale.copy_(((exponent + 1) << 23).view(torch.float32).masked_fill(is_broken, torch.nan).view(-1))
    y = blocks.abs() * ((253 - exponent) << 23).view(torch.float32)
    random = torch.full_like(bits, 1 << (_MANTISSA_SHIFT - 1))  # half a step, which rounds to nearest
    if noise is not None:
        random.view(-1)[:numel] = noise & ((1 << _MANTISSA_SHIFT) - 1)
    top = _top_exponent(payload.dtype)
    normal = ((y.view(torch.int32) + random) >> _MANTISSA_SHIFT) - ((127 - top) << 3)
    # In a broken block y may be inf or NaN, and their conversion to an integer is undefined.
    subnormal = (y * 2.0 ** (2 + top) + random.float() * 2.0**-_MANTISSA_SHIFT).nan_to_num_(0, 0, 0).to(torch.int32)
    code = torch.where(y < 2.0 ** (1 - top), subnormal, normal)
    if payload.dtype == torch.int8:
        code |= (bits >> 24) & -0x80  # the sign: the shift is arithmetic, so it is -128 or 0
    else:
        # Only 0 becomes 0: a second moment of 0 would divide by eps alone.
        code.masked_fill_((code == 0) & (y > 0), 1)
    payload.copy_(code.masked_fill_(is_broken, 0).view(-1)[:numel])


def _top_exponent(payload_dtype: torch.dtype) -> int:
    """Return the code of the largest exponent, which stands for the scale."""
    return 15 if payload_dtype == torch.int8 else 31


def step_seed(step: int) -> int:
    """Return the seed of a step's random bits, below 2^32."""
    return step * 0x9E3779B1 & 0xFFFFFFFF


def rounding_noise(gradient: Tensor, weight: Tensor, step: int) -> Tensor:
    """Hash each element before its update to random bits, (n,) int32, with MurmurHash3's mixing.

    gradient, weight: (n,) float32; the gradient is scaled. The C++ kernel has the same function.
    """
    seed = signed_word(step_seed(step))
    return mixed(gradient.view(torch.int32) * signed_word(0x9E3779B1) ^ (weight.view(torch.int32) + seed))


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of x, (n,) int32, with the last steps of MurmurHash3: each bit affects all bits of the result."""
    x = (x ^ _shifted(x, 16)) * signed_word(0x85EBCA6B)
    x = (x ^ _shifted(x, 13)) * signed_word(0xC2B2AE35)
    return x ^ _shifted(x, 16)


def other_noise(noise: Tensor) -> Tensor:
    """Derive random bits for an element's second state, (n,) int32."""
    x = noise * signed_word(0x9E3779B1)
    return x ^ _shifted(x, 15)


def signed_word(word: int) -> int:
    """Return the int32 with the bits of a word below 2^32."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift x right by `count` with zeros from the left."""
    return (x >> count) & ((1 << (32 - count)) - 1)
