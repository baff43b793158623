"""Launches of the layer norm."""

import torch

from lowtide.kernels.triton import layer_norm


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(dtype: torch.dtype, has_residual: bool, n_cols: int) -> None:
    rows, vector = meta(64, n_cols, dtype=dtype), meta(n_cols, dtype=dtype)
    layer_norm.forward(rows, rows if has_residual else None, vector, vector, 1e-5)


def backward(dtype: torch.dtype, has_residual: bool, n_cols: int) -> None:
    rows, sums = meta(64, n_cols, dtype=dtype), meta(64, dtype=torch.float32)
    dh = rows if has_residual else None
    layer_norm.backward(rows, dh, rows, meta(n_cols, dtype=dtype), dtype, sums, sums)


CASES = {
    "forward": lambda dtype: forward(dtype, False, 4096),
    "forward with residual": lambda dtype: forward(dtype, True, 4096),
    "forward of narrow rows": lambda dtype: forward(dtype, False, 128),
    "forward of wide rows": lambda dtype: forward(dtype, True, 16384),
    "backward": lambda dtype: backward(dtype, False, 4096),
    "backward with residual": lambda dtype: backward(dtype, True, 4096),
    "backward of the widest whole rows": lambda dtype: backward(dtype, True, 8192),
    "backward of narrow rows": lambda dtype: backward(dtype, False, 128),
    "backward of wide rows": lambda dtype: backward(dtype, True, 16384),
}
