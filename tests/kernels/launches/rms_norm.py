"""Launches of the RMS norm."""

import torch

from lowtide.kernels.dispatch import form_of
from lowtide.kernels.triton.row_norm import RmsNorm


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(dtype: torch.dtype, has_residual: bool, n_cols: int) -> None:
    rows, weight = meta(64, n_cols, dtype=dtype), meta(n_cols, dtype=dtype)
    residual = rows if has_residual else None
    launches = RmsNorm(form_of(rows), form_of(rows) if has_residual else None, form_of(weight), 1e-6, 0.0)
    launches.forward(rows, residual, weight)


def backward(dtype: torch.dtype, has_residual: bool, n_cols: int, n_rows: int = 64, wants_dw: bool = True) -> None:
    rows, rstd = meta(n_rows, n_cols, dtype=dtype), meta(n_rows, dtype=torch.float32)
    dh, weight = rows if has_residual else None, meta(n_cols, dtype=dtype)
    RmsNorm(form_of(rows), None, form_of(weight), 1e-6, 0.0).backward(rows, dh, rows, weight, rstd, wants_dw)


CASES = {
    "forward": lambda dtype: forward(dtype, False, 4096),
    "forward with residual": lambda dtype: forward(dtype, True, 4096),
    "forward of narrow rows": lambda dtype: forward(dtype, False, 128),
    "forward of wide rows": lambda dtype: forward(dtype, True, 16384),
    "backward": lambda dtype: backward(dtype, False, 4096),
    "backward with residual": lambda dtype: backward(dtype, True, 4096),
    "backward of few rows": lambda dtype: backward(dtype, True, 4096, n_rows=8),
    "backward of a frozen weight": lambda dtype: backward(dtype, True, 4096, wants_dw=False),
    "backward of the widest whole rows": lambda dtype: backward(dtype, True, 8192),
    "backward of narrow rows": lambda dtype: backward(dtype, False, 128, n_rows=4096),
    "backward of wide rows": lambda dtype: backward(dtype, True, 16384),
}
