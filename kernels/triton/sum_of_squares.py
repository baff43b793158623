"""Triton form of `kernels/sum_of_squares.py`: a program takes a few blocks and writes the sum of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .tables import entry_of, tables

TILE_NUMEL = 4096  # elements of a program: 32 a thread
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _squares_of_rows(x):
    """The sum of squares of each row of x, (ROWS, COLS) float32 -> (ROWS,) float64; inf or nan where a value is.

    With 2^e about the largest |x| of the row: sum((x / 2^e)^2) * 2^2e.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of |x|, nan above all: tl.max would drop it
    exponent = tl.minimum(tl.maximum(tl.max(bits, axis=1) >> 23, 1), 252)  # both powers below are normal
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    power = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
    y = x * inverse[:, None]
    return tl.sum(y * y, axis=1).to(tl.float64) * (power * power)


@triton.jit
def _store_squares(squares, S_ptr, FLAG_ptr, block, ok):
    tl.store(S_ptr + block, squares, mask=ok)
    if FLAG_ptr is not None:
        is_bad = (squares < float("inf")).to(tl.int32) == 0
        if tl.max(tl.where(ok, is_bad, False).to(tl.int32), axis=0) != 0:
            tl.store(FLAG_ptr, 1)


@triton.jit
def _flat_kernel(
    X_ptr, S_ptr, FLAG_ptr, n_blocks,
    BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Whole blocks of one buffer. The mask is the same along a row, so loads are wide whatever n_blocks is."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = block < n_blocks
    at = block[:, None] * BLOCK_NUMEL + tl.arange(0, BLOCK_NUMEL)[None, :]
    x = tl.load(X_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    _store_squares(_squares_of_rows(x), S_ptr, FLAG_ptr, block, ok)


@triton.jit
def _table_kernel(
    TABLE_ptr, S_ptr, FLAG_ptr,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Elements low to high at an address that is a multiple of 16 bytes, in blocks counted from that address."""
    entry, part = entry_of(tl.program_id(0), TABLE_ptr, WIDTH)
    address = tl.load(TABLE_ptr + WIDTH + entry)
    low = tl.load(TABLE_ptr + 2 * WIDTH + entry)
    high = tl.load(TABLE_ptr + 3 * WIDTH + entry)
    first_square = tl.load(TABLE_ptr + 4 * WIDTH + entry)
    X_ptr = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    start = part * (ROWS * BLOCK_NUMEL)
    rows = tl.arange(0, ROWS)
    at = start + rows[:, None] * BLOCK_NUMEL + tl.arange(0, BLOCK_NUMEL)[None, :]
    # Both branches give one tensor of one layout: a block's sum does not depend on where an entry begins.
    if (start >= low) & (start + ROWS * BLOCK_NUMEL <= high):
        x = tl.load(X_ptr + at).to(tl.float32)
    else:
        x = tl.load(X_ptr + at, mask=(at >= low) & (at < high), other=0.0).to(tl.float32)
    block = part * ROWS + rows
    _store_squares(_squares_of_rows(x), S_ptr + first_square, FLAG_ptr, block, block * BLOCK_NUMEL < high)


def squares_by_block(tensor: Tensor, block_numel: int) -> Tensor:
    """tensor: of any shape and strides -> (ceil(n / block_numel),) float64."""
    flat = aligned(tensor)
    if flat.numel() and flat.numel() % block_numel == 0:
        return _squares_of_one(flat, block_numel, None)
    return squares_of_each([flat], block_numel, None)[0]


def squares_of_each(tensors: Sequence[Tensor], block_numel: int, non_finite: Tensor | None) -> list[Tensor]:
    """tensors: of any shapes and strides -> (ceil(n / block_numel),) float64 of each."""
    flats = [aligned(tensor) for tensor in tensors]
    squares: dict[int, Tensor] = {}  # by index, of those that are not empty
    for dtype in {flat.dtype for flat in flats}:
        chosen = [index for index, flat in enumerate(flats) if flat.dtype == dtype and flat.numel()]
        if len(chosen) == 1 and flats[chosen[0]].numel() % block_numel == 0:
            squares[chosen[0]] = _squares_of_one(flats[chosen[0]], block_numel, non_finite)
        elif chosen:
            spans = [(flats[index].data_ptr(), 0, flats[index].numel()) for index in chosen]
            together, counts = squares_of_spans(spans, flats[chosen[0]], block_numel, non_finite)
            squares |= zip(chosen, together.split(counts), strict=True)
    numbered = enumerate(flats)
    return [squares[index] if flat.numel() else flat.new_empty(0, dtype=torch.float64) for index, flat in numbered]


def squares_of_spans(
    spans: Sequence[tuple[int, int, int]], like: Tensor, block_numel: int, non_finite: Tensor | None
) -> tuple[Tensor, list[int]]:
    """Sums of all spans' blocks, (num_blocks,) float64, one span's behind the other's, and how many each has.

    spans: (address, a multiple of 16; low; high) with low < high, counted in elements from the address, and low in the
    first block. like: a tensor of their dtype and device.
    """
    counts = [-(-high // block_numel) for _, _, high in spans]
    first_squares = [0]
    for count in counts:
        first_squares.append(first_squares[-1] + count)
    squares = torch.empty(first_squares[-1], dtype=torch.float64, device=like.device)
    rows = TILE_NUMEL // block_numel
    num_programs = [-(-count // rows) for count in counts]
    fields = [*map(list, zip(*spans, strict=True)), first_squares[:-1]]
    for table, width, grid in tables(num_programs, fields, like.device):
        launch(
            _table_kernel, (grid,), num_warps=4, TABLE_ptr=table, S_ptr=squares, FLAG_ptr=non_finite,
            DTYPE=_DTYPES[like.dtype], WIDTH=width, BLOCK_NUMEL=block_numel, ROWS=rows,
        )  # fmt: skip
    return squares, counts


def aligned(tensor: Tensor) -> Tensor:
    """tensor as (n,), contiguous, at an address that is a multiple of 16 bytes; itself where it is."""
    flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1).contiguous()
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


def _squares_of_one(flat: Tensor, block_numel: int, non_finite: Tensor | None) -> Tensor:
    n_blocks, rows = flat.numel() // block_numel, TILE_NUMEL // block_numel
    squares = torch.empty(n_blocks, dtype=torch.float64, device=flat.device)
    launch(
        _flat_kernel, (-(-n_blocks // rows),), num_warps=4, X_ptr=flat, S_ptr=squares, FLAG_ptr=non_finite,
        n_blocks=n_blocks, BLOCK_NUMEL=block_numel, ROWS=rows,
    )  # fmt: skip
    return squares
