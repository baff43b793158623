"""Values of a message in few bits: blocks of 128, each with a scale.

    scale = max |x| / most        code = x / scale, rounded        message = codes of all blocks | scales

[Note: Quantized blocks]
most is 127 with 8 bits and 7 with 4. Codes go as two's complement of 8 bits, or two of them, plus 8, in a byte: element
i of a block in the lower half of byte i, element 64 + i in the upper one. A scale is a float32, so an element takes
bits + 0.25 bits. A message of n elements is one tensor of bytes, and n a multiple of 128.

Rounding is to the nearest, ties to even, or, with random bits, up or down so that the mean is exact: |error| is at most
half of the scale, or below the scale. Random bits are those of [Note: Numbered draws] in weight_rounding.py: the same
wherever and with whatever they are drawn. In a block with a value that is not finite such values become NaN and the
others zero. A block whose largest value is below 2^-100 is zero.

Every operation is one of IEEE's in a fixed order, so the C++ and the Triton form have the bits of this one.
Sources: ZeRO++, arXiv 2306.10209, section 3; SDP4Bit, arXiv 2410.15526.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_blocks import cpu_blocks
from .dispatch import Backend, uses_triton
from .weight_rounding import Rounding

QUANTIZED_BLOCK_NUMEL = 128
_SMALLEST = 2.0**-100
_UNIT = 2.0**-24  # random numbers are multiples of it, below 1


def quantized_bytes(numel: int, bits: int) -> int:
    """Of a message with so many elements, a multiple of 128."""
    assert numel % QUANTIZED_BLOCK_NUMEL == 0 and bits in (4, 8), (numel, bits)
    return numel * bits // 8 + numel // QUANTIZED_BLOCK_NUMEL * 4


def quantize(
    values: Tensor,
    bits: int,
    message: Tensor,
    *,
    less: Tensor | None = None,
    rounding: Rounding | None = None,
    step: int = 0,
    backend: Backend = "auto",
) -> None:
    """message, (quantized_bytes(n, bits),) uint8 = values - less, (n,) of any float dtype that float32 holds.

    rounding, step: of the random bits; None: to the nearest.
    """
    values = values.detach()
    if uses_triton(backend, "quantize", values, less):
        from .triton.quantized_blocks import quantize as by_triton

        by_triton(values, bits, message, less, rounding, step)
        return
    kernel = cpu_blocks() if backend == "auto" and values.device.type == "cpu" else None
    if kernel is not None and kernel.serves(values, less, message):
        kernel.quantize(values, bits, message, less, rounding, step)
        return
    quantize_reference(values, bits, message, less, rounding, step)


def dequantize(message: Tensor, bits: int, out: Tensor, *, adds: bool = False, backend: Backend = "auto") -> None:
    """out, (n,) of a float dtype, = what a message says; adds: is added to, in float32, and rounded once."""
    if uses_triton(backend, "dequantize", out):
        from .triton.quantized_blocks import dequantize as by_triton

        by_triton(message, bits, out, adds)
        return
    kernel = cpu_blocks() if backend == "auto" and out.device.type == "cpu" else None
    if kernel is not None and kernel.serves(out, None, message):
        kernel.dequantize(message, bits, out, adds)
        return
    dequantize_reference(message, bits, out, adds)


def quantize_reference(
    values: Tensor, bits: int, message: Tensor, less: Tensor | None, rounding: Rounding | None, step: int
) -> None:
    """The formula in eager torch."""
    numel, most = values.numel(), 127 if bits == 8 else 7
    x = values.float()
    if less is not None:
        x = x - less.float()
    x = x.view(-1, QUANTIZED_BLOCK_NUMEL)
    is_bad = ~torch.isfinite(x)
    is_broken = is_bad.any(1, keepdim=True)
    largest = x.abs().nan_to_num_(0, 0, 0).amax(1, keepdim=True)
    is_zero = largest < _SMALLEST
    inverse = torch.full_like(largest, most) / largest  # `most / largest` would be rounded twice
    inverse.masked_fill_(is_zero, 0.0)
    scale = (largest / most).masked_fill_(is_zero, 0.0).masked_fill_(is_broken, torch.nan)
    y = torch.where(is_broken, is_bad.float(), x * inverse)
    if rounding is None:
        y = y.round()
    else:
        noise = rounding.noise(numel, step, values.device).view_as(y)
        y = (y + (noise >> 8 & 0xFFFFFF).float() * _UNIT).floor()
    codes = torch.where(is_broken, is_bad.float(), y.clamp_(-most, most)).to(torch.int32)
    payload, scales = _parts(message, bits)
    scales.copy_(scale.view(-1))
    if bits == 8:
        payload.view(torch.int8).copy_(codes.view(-1))
        return
    low, high = (codes + 8).chunk(2, dim=1)
    payload.copy_((low | high << 4).reshape(-1))


def dequantize_reference(message: Tensor, bits: int, out: Tensor, adds: bool) -> None:
    """The formula in eager torch."""
    payload, scales = _parts(message, bits)
    if bits == 8:
        codes = payload.view(torch.int8).view(-1, QUANTIZED_BLOCK_NUMEL).float()
    else:
        halves = payload.view(-1, QUANTIZED_BLOCK_NUMEL // 2).to(torch.int32)
        codes = torch.cat([halves & 15, halves >> 4], dim=1).sub_(8).float()
    values = torch.where(codes == 0, codes, codes * scales.view(-1, 1)).view(-1)
    out.copy_(out.float().add_(values) if adds else values)


def _parts(message: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes, uint8; scales, float32) of a message."""
    of_block = QUANTIZED_BLOCK_NUMEL * bits // 8
    num_blocks = message.numel() // (of_block + 4)
    return message[: num_blocks * of_block], message[num_blocks * of_block :].view(torch.float32)
