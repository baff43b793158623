"""Triton form of `kernels/multi_tensor.py`: a program takes a chunk of one tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .tables import entry_of, tables

CHUNK_NUMEL = 8192  # elements of a program: 32 a thread
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _copy_chunk(
    X_ptr, Y_ptr, SCALE_ptr, scale, at, ok,
    DTYPE: tl.constexpr, HAS_SOURCE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """y = scale * x (+ y)"""
    if HAS_SOURCE:
        x = tl.load(X_ptr + at, mask=ok)
        if SCALE_ptr is not None:
            x = x.to(tl.float32) * tl.load(SCALE_ptr).to(tl.float32)
        if scale is not None:
            x = x.to(tl.float32) * scale
        if ACCUMULATE:
            x = x.to(tl.float32) + tl.load(Y_ptr + at, mask=ok).to(tl.float32)
    else:
        x = tl.zeros(at.shape, tl.float32)
    tl.store(Y_ptr + at, x.to(DTYPE), mask=ok)


@triton.jit
def _copy_kernel(
    TABLE_ptr, SCALE_ptr, scale,
    SOURCE: tl.constexpr, DTYPE: tl.constexpr, HAS_SOURCE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr, CHUNK_NUMEL: tl.constexpr, TAIL_NUMEL: tl.constexpr,
):  # fmt: skip
    """Fields of the table: addresses of sources and of destinations, numbers of elements."""
    entry, part = entry_of(tl.program_id(0), TABLE_ptr, WIDTH)
    X_ptr = tl.load(TABLE_ptr + WIDTH + entry).to(tl.pointer_type(SOURCE))
    Y_ptr = tl.load(TABLE_ptr + 2 * WIDTH + entry).to(tl.pointer_type(DTYPE))
    numel = tl.load(TABLE_ptr + 3 * WIDTH + entry)
    if IS_ALIGNED:
        X_ptr = tl.multiple_of(X_ptr, 16)
        Y_ptr = tl.multiple_of(Y_ptr, 16)
    X_ptr += part * CHUNK_NUMEL
    Y_ptr += part * CHUNK_NUMEL
    rest = tl.minimum(numel - part * CHUNK_NUMEL, CHUNK_NUMEL).to(tl.int32)
    if rest == CHUNK_NUMEL:  # without a mask loads are wide
        _copy_chunk(X_ptr, Y_ptr, SCALE_ptr, scale, tl.arange(0, CHUNK_NUMEL), None, DTYPE, HAS_SOURCE, ACCUMULATE)
    else:
        for start in range(0, rest, TAIL_NUMEL):
            at = start + tl.arange(0, TAIL_NUMEL)
            _copy_chunk(X_ptr, Y_ptr, SCALE_ptr, scale, at, at < rest, DTYPE, HAS_SOURCE, ACCUMULATE)


def copy_scaled(
    destinations: Sequence[Tensor], sources: Sequence[Tensor | None], scale: float | Tensor, accumulate: bool
) -> None:
    """destinations, sources: of any strides; those that are not contiguous take a pass more."""
    groups: dict[tuple[torch.dtype | None, torch.dtype, bool], list[tuple[int, int, int]]] = defaultdict(list)
    copies: list[Tensor] = []  # in use until the launches are made
    scattered: list[tuple[Tensor, Tensor]] = []
    for place, source in zip(destinations, sources, strict=True):
        numel = place.numel()
        if not numel:
            continue
        if not place.is_contiguous():
            scattered.append((place, place.contiguous()))
            place = scattered[-1][1]
        if source is not None and not source.is_contiguous():
            copies.append(source.contiguous())
            source = copies[-1]
        x, y = 0 if source is None else source.data_ptr(), place.data_ptr()
        key = None if source is None else source.dtype, place.dtype, (x | y) % 16 == 0
        groups[key].append((x, y, numel))
    for (source_dtype, dtype, is_aligned), entries in groups.items():
        num_programs = [-(-numel // CHUNK_NUMEL) for *_, numel in entries]
        fields = list(zip(*entries, strict=True))
        has_source = source_dtype is not None
        is_number = not isinstance(scale, Tensor)
        for table, width, grid in tables(num_programs, fields, destinations[0].device):
            launch(
                _copy_kernel, (grid,), num_warps=8, TABLE_ptr=table,
                SCALE_ptr=None if is_number or not has_source else scale,
                scale=float(scale) if is_number and has_source and scale != 1 else None,
                SOURCE=_DTYPES[source_dtype or dtype], DTYPE=_DTYPES[dtype], HAS_SOURCE=has_source,
                IS_ALIGNED=is_aligned, ACCUMULATE=accumulate, WIDTH=width, CHUNK_NUMEL=CHUNK_NUMEL,
                TAIL_NUMEL=CHUNK_NUMEL // 8,
            )  # fmt: skip
    for destination, place in scattered:
        destination.copy_(place)
