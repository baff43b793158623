"""Sum squares by block and find non-finite values (`squares_by_block`), and compute the clipping factor.

    s_b = sum of x_i^2 over block b, in float64;  inf or nan exactly if block b has an inf or a nan

[Note: Block sums]
A block is summed in float32, in an order that depends only on its length, and its sum is cast to float64. So a block
has the same sum at every position, and for every division of a buffer into shards of whole blocks. Sums over blocks can
then be added exactly. (A different device may use a different order.) The Triton form first divides a block by the
power of two of its largest value: squares of float32 overflow above 1e19 and underflow below 1e-23. It differs from the
reference by a few units of float32. Results stay on the device, and the host does not wait.

[Note: What an update is told]
The factor of the gradients, and a flag to skip the update: a dozen operators on a few numbers, or a single launch. The
sum of squares comes as limbs (`exact_sum.py`), equal on every rank.

    norm = grad_scale * sqrt(sum of squares)
    factor = grad_scale * min(1, limit / (norm + 1e-6)) if norm > limit, else grad_scale
    skip = any of two flags, or a number that differs from its expected value
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Backend, triton_form, uses_triton
from .exact_sum import NUM_LIMBS, value_of

MAX_BLOCK_NUMEL = 4096
EPSILON = 1e-6  # in `clip_factor`


def squares_by_block(
    values: Tensor, block_numel: int, *, non_finite: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Sum the squares of each block of values, (...) -> (ceil(n / block_numel),) float64.

    block_numel: a power of 2 from 16 to 4096; the last block may be shorter. non_finite: (1,) int32 on the device of
    values, set to 1 if a value is inf or nan, else not changed. Raises ValueError for invalid arguments.
    """
    check_blocks("squares_by_block", [values], block_numel)
    if non_finite is not None and (tuple(non_finite.shape) != (1,) or non_finite.dtype != torch.int32):
        raise ValueError(
            f"squares_by_block: expected non_finite of shape (1,) and int32, found {tuple(non_finite.shape)} "
            f"{non_finite.dtype}"
        )
    if uses_triton(backend, "squares_by_block", values, non_finite):
        by_triton = triton_form("sum_of_squares").squares_by_block
        values = values.detach() if values.requires_grad else values
        return by_triton(values, block_numel, non_finite)  # type: ignore[no-any-return]
    squares = squares_by_block_reference(values, block_numel)
    if non_finite is not None:
        non_finite.masked_fill_(~squares.isfinite().all(), 1)
    return squares


def squares_of_each(
    tensors: Sequence[Tensor], block_numel: int, *, non_finite: Tensor | None = None, backend: Backend = "auto"
) -> list[Tensor]:
    """Compute `squares_by_block` of each tensor."""
    check_blocks("squares_by_block", tensors, block_numel)
    return [squares_by_block(one, block_numel, non_finite=non_finite, backend=backend) for one in tensors]


def squares_by_block_reference(values: Tensor, block_numel: int) -> Tensor:
    """Sum squares by block in eager torch, in float32, or in float64 for float64 values."""
    values = values.detach()
    rest = values.numel() % block_numel
    if not rest:
        return _squares_of_rows(values.reshape(-1, block_numel))
    # The short block is summed alone, so that the whole blocks need no padded copy.
    whole, tail = values.reshape(-1).split([values.numel() - rest, rest])  # type: ignore[no-untyped-call]
    return torch.cat([_squares_of_rows(whole.view(-1, block_numel)), _squares_of_rows(tail.view(1, -1))])


def _squares_of_rows(blocks: Tensor) -> Tensor:
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    squares: Tensor = torch.linalg.vector_norm(blocks, dim=1, dtype=dtype).double().square()
    # On the CPU the host may look. On a device it would wait, so there the wide form is always computed.
    if dtype == torch.float64 or (blocks.device.type == "cpu" and bool(torch.isfinite(squares).all())):
        return squares
    wide: Tensor = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64)  # float32 overflows above 1e19
    return torch.where(torch.isfinite(squares), squares, wide.square())


def check_blocks(kernel: str, tensors: Sequence[Tensor], block_numel: int) -> None:
    """Raise ValueError unless tensors are floating-point and block_numel is a power of 2 from 16 to 4096."""
    if not 16 <= block_numel <= MAX_BLOCK_NUMEL or block_numel & (block_numel - 1):
        raise ValueError(
            f"{kernel}: expected block_numel, a power of 2 from 16 to {MAX_BLOCK_NUMEL}, found {block_numel}"
        )
    for index, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            raise ValueError(f"{kernel}: expected floating-point values, found {tensor.dtype} at index {index}")


def clip_factor(
    sums: Tensor,
    flags: int,
    known: tuple[int, int],
    grad_scale: float,
    limit: float,
    *,
    clips_below: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute factor, (1,) float64, and skip, (1,) int64, not 0 to skip the update. [Note: What an update is told]

    sums: (m,) int64, with the limbs of the sum of squares first. flags: index of two flags that are 0 in a valid step.
    known: (index, value) of a number with a known value in a valid step. grad_scale: factor without clipping.
    limit: maximum norm. clips_below: clip also a norm at most 1e-6 below the limit.
    """
    # Without a limit, a norm of inf would give inf / inf = NaN.
    clips_below &= limit != math.inf
    if uses_triton(backend, "clip_factor", sums):
        by_triton = triton_form("sum_of_squares").clip_factor
        return by_triton(sums, flags, known, grad_scale, limit, clips_below, EPSILON)  # type: ignore[no-any-return]
    norm = value_of(sums[:NUM_LIMBS]).sqrt() * grad_scale
    # torch would compute `limit / tensor` by a rounded reciprocal.
    factor = (torch.full_like(norm, limit) / (norm + EPSILON)).clamp(max=1.0)
    if not clips_below:
        factor = torch.where(norm > limit, factor, 1.0)
    place, expected = known
    skip = sums[flags : flags + 2].sum(dim=0, keepdim=True) + (sums[place : place + 1] != expected)
    return (factor * grad_scale).view(1), skip
