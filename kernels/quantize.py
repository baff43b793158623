"""Block-wise quantization to 8 and 4 bits, for states and for communication; the formats are in `quantized.py`.

[Note: Rounding]
To nearest, |x^ - x| is at most half the distance of neighbouring levels: m / 254, m / 14 or 0.152 m. At random, it is
at most the whole distance, and the mean of x^ is x up to 2^-16 of that distance (nf4: 2^-22 m). Both up to a few
roundings of float32, of m. The random bits are a hash of the seed and of the element's number, so that a tensor in
parts has the codes of the whole. A seed gives the same bits in both forms: elements are brought to fixed point by one
multiplication, and what follows are integers, so that a compiler cannot fuse a multiplication with an addition.

[Note: Blocks out of range]
Where a block has inf, nan, or a magnitude from 2^126 on (8.5e37), its scale is nan and all of it reads as nan. Where
m < 2^-118 (3.0e-36), the scale is that of 2^-118. A zero stays a zero, except in a block that reads as nan.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .quantized import BROKEN_BITS, LEAST_BITS, NEAREST_BITS, NF4_FIXED, NF4_LEVELS, TOP_CODES, Format, Quantized


def quantize(
    values: Tensor,
    format: Format,
    block_numel: int = 256,
    *,
    seed: int | None = None,
    offset: int = 0,
    out: Quantized | None = None,
    backend: Backend = "auto",
) -> Quantized:
    """values, (...) floating-point, as codes and scales; blocks are counted in row-major order.

    seed: rounds at random, with these bits (see [Note: Rounding]); None rounds to nearest, ties away from zero
    (nf4: downward). offset: the number of the first element, for random bits of a part of a tensor. out: memory to
    write to, of the same shape, format and blocks. Raises ValueError where arguments do not fit.
    """
    if not values.is_floating_point():
        raise ValueError(f"quantize: expected floating-point values, found {values.dtype}")
    shape = tuple(values.shape)
    if out is None:
        out = Quantized.empty(shape, format, block_numel, values.device)
    elif (out.shape, out.format, out.block_numel) != (shape, format, block_numel):
        raise ValueError(
            f"quantize: expected out for {shape} {format} in blocks of {block_numel}, found {out.shape} {out.format} "
            f"in blocks of {out.block_numel}"
        )
    with torch.no_grad():
        flat = values.reshape(-1)
        if uses_triton(backend, "quantize", values, out.payload, out.scale):
            from .triton import quantize as triton_form

            triton_form.quantize(flat.contiguous(), out, seed, offset)
        else:
            quantize_reference(flat, out, seed, offset)
    return out


def dequantize(
    quantized: Quantized,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """The values, of the shape that was quantized, computed in float32 and rounded once to dtype.

    out: contiguous memory to write to, of that shape; its dtype counts then. accumulate: adds to it, before rounding.
    Raises ValueError where out does not fit, or is missing to accumulate.
    """
    if out is None:
        if accumulate:
            raise ValueError("dequantize: expected out, to accumulate in, found None")
        out = torch.empty(quantized.shape, dtype=dtype, device=quantized.payload.device)
    if tuple(out.shape) != quantized.shape or not out.is_contiguous() or not out.is_floating_point():
        raise ValueError(
            f"dequantize: expected contiguous floating-point memory of shape {quantized.shape}, found "
            f"{tuple(out.shape)} {out.dtype} with strides {out.stride()}"
        )
    with torch.no_grad():
        if uses_triton(backend, "dequantize", quantized.payload, quantized.scale, out):
            from .triton import quantize as triton_form

            triton_form.dequantize(quantized, out.view(-1), accumulate)
        else:
            dequantize_reference(quantized, out.view(-1), accumulate)
    return out


def quantize_reference(values: Tensor, out: Quantized, seed: int | None, offset: int) -> None:
    """The formula in eager torch. values: (n,)."""
    numel, num_blocks, device = values.numel(), out.scale.numel(), values.device
    blocks = torch.zeros(num_blocks * out.block_numel, device=device)
    blocks[:numel] = values
    blocks = blocks.view(num_blocks, out.block_numel)
    bits = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    is_broken = bits >= BROKEN_BITS
    largest = bits.masked_fill(is_broken, 0).clamp_(min=LEAST_BITS).view(torch.float32)
    # A tensor, not a number: torch multiplies by the inverse of a number, and rounds twice.
    top = torch.full_like(largest, TOP_CODES[out.format])
    out.scale.copy_((largest / top).masked_fill_(is_broken, torch.nan).view(-1))
    y = blocks.masked_fill(is_broken, 0) * (top / largest)
    noise = None if seed is None else random_bits(y.numel(), seed, offset, device).view(y.shape)
    if out.format == "nf4":
        code = _level_of((y * 2.0**23).to(torch.int64), noise)
    else:
        fraction = NEAREST_BITS >> 16 if noise is None else noise >> 16
        code = ((y.abs() * 2.0**16).to(torch.int64) + fraction >> 16).clamp_(max=TOP_CODES[out.format])
        code = torch.where(y < 0, -code, code)
    code = code.view(-1)[: numel + (numel & 1)]  # an odd end is filled by a zero
    if out.format == "int8":
        out.payload.copy_(code[:numel])
        return
    code = code if out.format == "nf4" else code + 8
    out.payload.copy_(code[0::2] | code[1::2] << 4)


def dequantize_reference(quantized: Quantized, out: Tensor, accumulate: bool) -> None:
    """The formula in eager torch. out: (n,)."""
    code, numel = quantized.payload, quantized.numel
    if quantized.format != "int8":
        code = torch.stack([code & 15, code >> 4], dim=1).view(-1)[:numel]
    if quantized.format == "nf4":
        level = torch.tensor(NF4_LEVELS, device=code.device)[code.long()]
    else:
        level = code.float() - (8 if quantized.format == "int4" else 0)
    values = level * quantized.scale.repeat_interleave(quantized.block_numel)[:numel]
    out.copy_(values.add_(out) if accumulate else values)


def random_bits(numel: int, seed: int, offset: int, device: torch.device | str) -> Tensor:
    """32 random bits for each element from number `offset` on, (numel,) int64: MurmurHash3's mixing of it and the seed.

    Of the seed, the lower 32 bits count.
    """
    word = 0xFFFFFFFF
    number = torch.arange(offset, offset + numel, dtype=torch.int64, device=device)
    x = _times(number & word, 0x9E3779B1) ^ ((_times(number >> 32 & word, 0x85EBCA77) + (seed & word)) & word)
    x = _times(x ^ x >> 16, 0x85EBCA6B)
    x = _times(x ^ x >> 13, 0xC2B2AE35)
    return x ^ x >> 16


def _level_of(y: Tensor, noise: Tensor | None) -> Tensor:
    """The code of y, (...) int64 in units of 2^-23: how many thresholds, one between two levels, are below it."""
    code = torch.zeros_like(y)
    for low, high in pairwise(NF4_FIXED):
        code += y > low + ((NEAREST_BITS if noise is None else noise) * (high - low) >> 32)
    return code


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32, for x below 2^32: by halves, for int64 holds no product of two words."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * factor & 0xFFFF) << 16)) & 0xFFFFFFFF
