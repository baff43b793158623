"""Quantize messages to 8 or 4 bits, in blocks of 128 with a scale (`quantize`, `dequantize`); pack signs.

    scale = max |x| / most        code = x / scale, rounded        message = codes of all blocks | scales

[Note: Quantized blocks]
most is 127 for 8 bits and 7 for 4. With 8 bits, a code is a byte in two's complement. With 4 bits, a byte has two codes
plus 8: element i of a block in the lower half of byte i, element 64 + i in the upper half. A scale is a float32, so an
element takes bits + 0.25 bits. A message of n elements is a tensor of bytes; n is a multiple of 128.

Without random bits, rounding is to nearest, ties to even: |error| is at most half of the scale. With random bits it is
up or down so that the mean is exact: |error| is below the scale. [Note: Numbered draws] in weight_rounding.py has the
random bits. In a block with a non-finite value, these values become NaN and the remaining values 0. A block whose
largest magnitude is below 2^-100 becomes 0.

Every operation is an IEEE operation in a fixed order, so the C++ and the Triton form give the same bits.
Sources: ZeRO++, arXiv 2306.10209, section 3; SDP4Bit, arXiv 2410.15526.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .cpu_build import NATIVE, load_library, made_as_wanted
from .dispatch import Backend, triton_form, uses_triton
from .weight_rounding import Rounding, step_key

QUANTIZED_BLOCK_NUMEL = 128
SIGNS_PER_BYTE = 8
_KINDS = {torch.float32: 1, torch.bfloat16: 2}  # `Kind` in cpu_blocks.cpp
_SMALLEST = 2.0**-100
_UNIT = 2.0**-24  # step of the random numbers in [0, 1)


def quantized_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a message of `numel` elements, a multiple of 128."""
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
    """Quantize values - less, (n,) of a float dtype up to float32, into message, (quantized_bytes(n, bits),) uint8.

    rounding, step: select the random bits; without rounding, round to nearest.
    """
    values = values.detach()
    if uses_triton(backend, "quantize", values, less):
        triton_form("quantized_blocks").quantize(values, bits, message, less, rounding, step)
        return
    kernel = cpu_blocks() if backend == "auto" and values.device.type == "cpu" else None
    if kernel is not None and kernel.serves(values, less, message):
        kernel.quantize(values, bits, message, less, rounding, step)
        return
    quantize_reference(values, bits, message, less, rounding, step)


def dequantize(message: Tensor, bits: int, out: Tensor, *, adds: bool = False, backend: Backend = "auto") -> None:
    """Decode a message into out, (n,) of a float dtype. adds: add to out, in float32 with a single rounding."""
    if uses_triton(backend, "dequantize", out):
        triton_form("quantized_blocks").dequantize(message, bits, out, adds)
        return
    kernel = cpu_blocks() if backend == "auto" and out.device.type == "cpu" else None
    if kernel is not None and kernel.serves(out, None, message):
        kernel.dequantize(message, bits, out, adds)
        return
    dequantize_reference(message, bits, out, adds)


def quantize_reference(
    values: Tensor, bits: int, message: Tensor, less: Tensor | None, rounding: Rounding | None, step: int
) -> None:
    """Quantize in eager torch."""
    numel, most = values.numel(), 127 if bits == 8 else 7
    x = values.float()
    if less is not None:
        x = x - less.float()
    x = x.view(-1, QUANTIZED_BLOCK_NUMEL)
    is_bad = ~torch.isfinite(x)
    is_broken = is_bad.any(1, keepdim=True)
    largest = x.abs().nan_to_num_(0, 0, 0).amax(1, keepdim=True)
    is_zero = largest < _SMALLEST
    inverse = torch.full_like(largest, most) / largest  # torch would compute `most / largest` with two roundings
    inverse.masked_fill_(is_zero, 0.0)
    scale = (largest / most).masked_fill_(is_zero, 0.0).masked_fill_(is_broken, torch.nan)
    y = torch.where(is_broken, is_bad.float(), x * inverse)
    if rounding is None:
        y = y.round()
    else:
        noise = rounding.noise(numel, step, values.device).view_as(y)
        # 24 bits, so that the conversion to float32 is exact.
        y = (y + (noise >> 8 & 0xFFFFFF).float() * _UNIT).floor()
    codes = torch.where(is_broken, is_bad.float(), y.clamp_(-most, most)).to(torch.int32)
    payload, scales = parts_of(message, bits)
    scales.copy_(scale.view(-1))
    if bits == 8:
        payload.view(torch.int8).copy_(codes.view(-1))
        return
    low, high = (codes + 8).chunk(2, dim=1)
    payload.copy_((low | high << 4).reshape(-1))


def dequantize_reference(message: Tensor, bits: int, out: Tensor, adds: bool) -> None:
    """Dequantize in eager torch."""
    payload, scales = parts_of(message, bits)
    if bits == 8:
        codes = payload.view(torch.int8).view(-1, QUANTIZED_BLOCK_NUMEL).float()
    else:
        halves = payload.view(-1, QUANTIZED_BLOCK_NUMEL // 2).to(torch.int32)
        codes = torch.cat([halves & 15, halves >> 4], dim=1).sub_(8).float()
    # A broken block has the scale NaN, and 0 * NaN would be NaN.
    values = torch.where(codes == 0, codes, codes * scales.view(-1, 1)).view(-1)
    out.copy_(out.float().add_(values) if adds else values)


def parts_of(message: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Split a message into views of its codes, uint8, and its scales, float32."""
    of_block = QUANTIZED_BLOCK_NUMEL * bits // 8
    num_blocks = message.numel() // (of_block + 4)
    return message[: num_blocks * of_block], message[num_blocks * of_block :].view(torch.float32)


class _Blocks(ctypes.Structure):
    """`struct Blocks` of cpu_blocks.cpp."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("less", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("next_task", ctypes.c_int64),
        ("first", ctypes.c_uint64),
        ("key", ctypes.c_uint32 * 2),
        ("kind", ctypes.c_int32),
        ("less_kind", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("is_drawn", ctypes.c_int32),
        ("adds", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class CpuBlocks:
    """The C++ kernel of `cpu_blocks.cpp`: a single pass over memory."""

    def __init__(self, flags: Sequence[str] = NATIVE) -> None:
        """Build or load the library. flags: compiler flags for instructions. Raises BuildError."""
        self._run = load_library(Path(__file__).with_name("cpu_blocks.cpp"), flags).lowtide_blocks
        self._run.argtypes = [ctypes.POINTER(_Blocks), ctypes.c_int32]
        self._run.restype = None

    def serves(self, values: Tensor, less: Tensor | None, message: Tensor) -> bool:
        """Tell if the kernel takes these tensors: contiguous, on the CPU, values and less both float32 or bfloat16."""
        tensors = [values, message, *([] if less is None else [less])]
        is_alike = less is None or less.dtype == values.dtype
        is_here = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        return is_here and is_alike and values.dtype in _KINDS

    def quantize(
        self, values: Tensor, bits: int, message: Tensor, less: Tensor | None, rounding: Rounding | None, step: int
    ) -> None:
        """Quantize tensors that the kernel `serves`."""
        job = _job(values, bits, message)
        if less is not None:
            job.less, job.less_kind = less.data_ptr(), job.kind
        if rounding is not None:
            job.is_drawn, job.first = 1, rounding.first
            job.key[0], job.key[1] = step_key(rounding.seed, step)
        self._run(ctypes.byref(job), 0)

    def dequantize(self, message: Tensor, bits: int, out: Tensor, adds: bool) -> None:
        """Dequantize tensors that the kernel `serves`."""
        job = _job(out, bits, message)
        job.adds = int(adds)
        self._run(ctypes.byref(job), 1)


def _job(values: Tensor, bits: int, message: Tensor) -> _Blocks:
    codes = message.data_ptr()
    return _Blocks(
        values=values.data_ptr(),
        codes=codes,
        scales=codes + values.numel() * bits // 8,
        blocks=values.numel() // QUANTIZED_BLOCK_NUMEL,
        kind=_KINDS[values.dtype],
        bits=bits,
        threads=torch.get_num_threads(),
    )


@functools.cache
def cpu_blocks() -> CpuBlocks | None:
    """Return the C++ kernel of this process, or None if torch must do the work: see `optimizer_step.cpu_kernel`."""
    return made_as_wanted(CpuBlocks, "CPU messages", "a C++ pass per message", "torch's kernels")


# -- signs, eight per byte --------------------------------------------------------------------------------------------


def packed_signs(values: Tensor) -> Tensor:
    """Pack signs: (n,), n a multiple of 8 -> (n / 8,) uint8. A bit is 1 for a value >= 0; the first bit is highest."""
    is_positive = values >= 0
    if values.device.type == "cpu":  # torch would need seven operators, each with a pass over memory
        return torch.from_numpy(np.packbits(is_positive.numpy()))
    weights = _weights(values.device)
    return (is_positive.view(-1, SIGNS_PER_BYTE) * weights).sum(1, dtype=torch.uint8)


def unpacked_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack signs: (n,) uint8 -> (8 n,) of +1 and -1."""
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy()))
    else:
        bits = ((packed.view(-1, 1) & _weights(packed.device)) != 0).view(-1)
    return bits.to(dtype).mul_(2).sub_(1)


def _weights(device: torch.device) -> Tensor:
    # Made on the device: the host would wait for a copy.
    return 1 << torch.arange(SIGNS_PER_BYTE - 1, -1, -1, dtype=torch.uint8, device=device)
