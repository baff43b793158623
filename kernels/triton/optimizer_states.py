"""Triton form of `kernels/optimizer_states.py`, with the same bits: random bits, loads and stores of states."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """Mix the bits of a uint32 with the last steps of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def rounding_noise(g, w, seed):
    """Hash each element to uint32 random bits. g, w: float32, the scaled gradient and the weight before its update."""
    return mixed((g.to(tl.uint32, bitcast=True) * 0x9E3779B1) ^ (w.to(tl.uint32, bitcast=True) + seed.to(tl.uint32)))


@triton.jit
def numbered_noise(number, low_key, high_key):
    """Draw random bits as `Rounding.noise` does. number: int64, of each element."""
    x = mixed(number.to(tl.uint32) + low_key.to(tl.uint32))
    return mixed(x ^ ((number >> 32).to(tl.uint32) + high_key.to(tl.uint32)))


@triton.jit
def other_noise(noise):
    """Derive uint32 random bits for an element's next state."""
    x = noise * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def rounded_at_random(x, noise):
    """Round x, float32, to bfloat16 up or down, so that the mean is exact."""
    halves = tl.where(x == x, (x.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) >> 16, 0x7FC0)
    return halves.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest_bfloat16(x):
    """Round x, float32, to the nearest bfloat16, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    halves = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    return halves.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def with_byte(w, rest):
    """Join a bfloat16 weight, as float32, and its int8 byte. See [Note: Split weights] in weight_rounding.py."""
    return (w.to(tl.int32, bitcast=True) + (rest.to(tl.int32) << 8)).to(tl.float32, bitcast=True)


@triton.jit
def split_at_random(x, noise):
    """Split x, float32, into the nearest bfloat16 and an int8 byte. noise: 8 random bits."""
    drawn = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFFFF00
    halves = tl.where(x == x, (drawn + 0x8000) >> 16, 0x7FC0)
    rest = tl.where(x == x, drawn >> 8, 0)
    return halves.to(tl.uint16).to(tl.bfloat16, bitcast=True), rest.to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def load_state(S_ptr, at, ok, SCALE_ptr, block, block_ok):
    """Load elements at, (NUM_BLOCKS, 256), with mask ok, as float32. block: index of each block; SCALE_ptr or None.

    See [Note: 8-bit states] in `kernels/optimizer_states.py`.
    """
    stored = tl.load(S_ptr + at, mask=ok, other=0)
    if SCALE_ptr is not None:
        IS_SIGNED: tl.constexpr = S_ptr.dtype.element_ty == tl.int8
        TOP: tl.constexpr = 15 if IS_SIGNED else 31
        scale = tl.load(SCALE_ptr + block, mask=block_ok, other=1.0)
        code = stored.to(tl.int32)
        magnitude = code & 0x7F if IS_SIGNED else code
        subnormal = magnitude.to(tl.float32) * 2.0 ** (-2 - TOP)
        normal = ((magnitude + ((127 - TOP) << 3)) << 20).to(tl.float32, bitcast=True)
        values = tl.where(magnitude < 8, subnormal, normal) * scale[:, None]
        values = tl.where(code < 0, -values, values)
    else:
        values = stored.to(tl.float32)
    return values


@triton.jit
def store_state(S_ptr, at, ok, SCALE_ptr, block, block_ok, x, noise):
    """Store x, float32, for `load_state`, with random rounding to a narrower dtype."""
    if SCALE_ptr is not None:
        IS_SIGNED: tl.constexpr = S_ptr.dtype.element_ty == tl.int8
        TOP: tl.constexpr = 15 if IS_SIGNED else 31
        bits = x.to(tl.int32, bitcast=True)
        # Elements behind the end of the shard must not raise the scale.
        magnitude = tl.where(ok, bits & 0x7FFFFFFF, 0)
        exponent = tl.max(magnitude, axis=1) >> 23
        is_broken = exponent >= 253  # the inverse of the scale would be denormal
        exponent = tl.minimum(exponent, 252)
        scale = tl.where(is_broken, 0x7FC00000, (exponent + 1) << 23).to(tl.float32, bitcast=True)
        tl.store(SCALE_ptr + block, scale, mask=block_ok)
        inverse = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
        y = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]
        random = (noise & 0xFFFFF).to(tl.int32)
        is_small = y < 2.0 ** (1 - TOP)
        # 0 in place of a large y: its conversion to int32 below would be undefined.
        steps = tl.where(is_small, y, 0.0) * 2.0 ** (2 + TOP) + random.to(tl.float32) * 2.0**-20
        normal = ((y.to(tl.int32, bitcast=True) + random) >> 20) - ((127 - TOP) << 3)
        code = tl.where(is_small, steps.to(tl.int32), normal)
        if IS_SIGNED:
            code |= (bits >> 24) & -0x80
        else:
            code = tl.where((code == 0) & (y > 0.0), 1, code)
        code = tl.where(is_broken[:, None], 0, code)
        tl.store(S_ptr + at, code.to(S_ptr.dtype.element_ty), mask=ok)
    elif S_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(S_ptr + at, rounded_at_random(x, noise), mask=ok)
    else:
        tl.store(S_ptr + at, x, mask=ok)
