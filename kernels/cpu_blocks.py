"""Quantized blocks on the CPU as one C++ pass over memory; `cpu_blocks.cpp` says how it computes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .cpu_build import NATIVE, load_library, made_as_wanted
from .weight_rounding import Rounding, step_key

SOURCE = Path(__file__).with_suffix(".cpp")
_KINDS = {torch.float32: 1, torch.bfloat16: 2}
_BLOCK_NUMEL = 128


class _Blocks(ctypes.Structure):
    """The struct of the same name in cpu_blocks.cpp."""

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
    """The built library."""

    def __init__(self, flags: Sequence[str] = NATIVE) -> None:
        """flags: which instructions the compiler may use. Raises BuildError."""
        self._run = load_library(SOURCE, flags).lowtide_blocks
        self._run.argtypes = [ctypes.POINTER(_Blocks), ctypes.c_int32]
        self._run.restype = None

    def serves(self, values: Tensor, less: Tensor | None, message: Tensor) -> bool:
        """Whether this kernel takes such tensors: contiguous, float32 or bfloat16, both values alike, on the CPU."""
        tensors = [values, message, *([] if less is None else [less])]
        is_alike = less is None or less.dtype == values.dtype
        is_here = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        return is_here and is_alike and values.dtype in _KINDS

    def quantize(
        self, values: Tensor, bits: int, message: Tensor, less: Tensor | None, rounding: Rounding | None, step: int
    ) -> None:
        """As `quantized_blocks.quantize`, for what it `serves`."""
        job = _job(values, bits, message)
        if less is not None:
            job.less, job.less_kind = less.data_ptr(), job.kind
        if rounding is not None:
            job.is_drawn, job.first = 1, rounding.first
            job.key[0], job.key[1] = step_key(rounding.seed, step)
        self._run(ctypes.byref(job), 0)

    def dequantize(self, message: Tensor, bits: int, out: Tensor, adds: bool) -> None:
        """As `quantized_blocks.dequantize`, for what it `serves`."""
        job = _job(out, bits, message)
        job.adds = int(adds)
        self._run(ctypes.byref(job), 1)


def _job(values: Tensor, bits: int, message: Tensor) -> _Blocks:
    codes = message.data_ptr()
    return _Blocks(
        values=values.data_ptr(),
        codes=codes,
        scales=codes + values.numel() * bits // 8,
        blocks=values.numel() // _BLOCK_NUMEL,
        kind=_KINDS[values.dtype],
        bits=bits,
        threads=torch.get_num_threads(),
    )


@functools.cache
def cpu_blocks() -> CpuBlocks | None:
    """The kernel of this process, or None where torch's kernels do the work, as `cpu_optimizer.cpu_kernel` says."""
    return made_as_wanted(CpuBlocks, "CPU messages", "one C++ pass a message", "torch's kernels")
