"""Launches of SwiGLU and GeGLU."""

import torch

from lowtide.kernels.dispatch import form_of
from lowtide.kernels.triton.gated_mlp import GatedMlp


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(dtype: torch.dtype, activation: str, n_cols: int = 11008) -> None:
    packed = meta(64, 2 * n_cols, dtype=dtype)
    GatedMlp(form_of(packed), None, activation).forward(packed, None)


def backward(dtype: torch.dtype, activation: str, n_cols: int = 11008) -> None:
    rows, packed = meta(64, n_cols, dtype=dtype), meta(64, 2 * n_cols, dtype=dtype)
    GatedMlp(form_of(packed), None, activation).backward(rows, packed, None)


CASES = {
    "swiglu": lambda dtype: forward(dtype, "silu"),
    "swiglu of narrow rows": lambda dtype: forward(dtype, "silu", 192),
    "swiglu backward": lambda dtype: backward(dtype, "silu"),
    "geglu": lambda dtype: forward(dtype, "gelu"),
    "geglu backward": lambda dtype: backward(dtype, "gelu"),
    "geglu with tanh": lambda dtype: forward(dtype, "gelu_tanh"),
    "geglu with tanh backward": lambda dtype: backward(dtype, "gelu_tanh"),
}
