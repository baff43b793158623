"""Launches of the RMS norm."""

import torch

from lowtide.kernels.triton import rms_norm


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(dtype: torch.dtype, has_residual: bool, n_cols: int) -> None:
    residual = meta(64, n_cols, dtype=dtype) if has_residual else None
    rms_norm.forward(meta(64, n_cols, dtype=dtype), residual, meta(n_cols, dtype=dtype), 1e-6, 0.0)


def backward(dtype: torch.dtype, has_residual: bool, n_cols: int) -> None:
    dh = meta(64, n_cols, dtype=dtype) if has_residual else None
    rows = meta(64, n_cols, dtype=dtype)
    rms_norm.backward(rows, dh, rows, meta(n_cols, dtype=dtype), meta(64, dtype=torch.float32), 0.0)


CASES = {
    "forward": lambda dtype: forward(dtype, False, 4096),
    "forward with residual": lambda dtype: forward(dtype, True, 4096),
    "forward of wide rows": lambda dtype: forward(dtype, True, 16384),
    "backward": lambda dtype: backward(dtype, False, 4096),
    "backward with residual": lambda dtype: backward(dtype, True, 4096),
    "backward of wide rows": lambda dtype: backward(dtype, True, 16384),
}
