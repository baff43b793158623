"""Launches of the layer norm."""

import torch

from lowtide.kernels.triton import row_norm


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(dtype: torch.dtype, has_residual: bool, n_cols: int) -> None:
    rows, vector = meta(64, n_cols, dtype=dtype), meta(n_cols, dtype=dtype)
    row_norm.forward(rows, rows if has_residual else None, vector, vector, 1e-5, 0.0, True)


def backward(dtype: torch.dtype, has_residual: bool, n_cols: int, n_rows: int = 64) -> None:
    rows, sums = meta(n_rows, n_cols, dtype=dtype), meta(n_rows, dtype=torch.float32)
    dh, weight = rows if has_residual else None, meta(n_cols, dtype=dtype)
    row_norm.backward(rows, dh, rows, weight, sums, sums, 0.0, dtype, dtype)


CASES = {
    "forward": lambda dtype: forward(dtype, False, 4096),
    "forward with residual": lambda dtype: forward(dtype, True, 4096),
    "forward of narrow rows": lambda dtype: forward(dtype, False, 128),
    "forward of wide rows": lambda dtype: forward(dtype, True, 16384),
    "backward": lambda dtype: backward(dtype, False, 4096),
    "backward with residual": lambda dtype: backward(dtype, True, 4096),
    "backward of few rows": lambda dtype: backward(dtype, True, 4096, n_rows=8),
    "backward of the widest whole rows": lambda dtype: backward(dtype, True, 8192),
    "backward of narrow rows": lambda dtype: backward(dtype, False, 128, n_rows=4096),
    "backward of wide rows": lambda dtype: backward(dtype, True, 16384),
}
