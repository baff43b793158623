"""Launches of the rotary embedding."""

import torch

from lowtide.kernels.triton.rotary import Rotation


def rotate(
    dtype: torch.dtype, interleaved: bool = False, transposed: bool = False, rotary_dim: int = 128, heads: int = 32
) -> None:
    q = torch.empty((2, 64, heads, 128), dtype=dtype, device="meta").transpose(1, 2)
    k = torch.empty((2, 64, 8, 128), dtype=dtype, device="meta").transpose(1, 2)
    table = torch.empty((1, 64, rotary_dim), dtype=torch.float32, device="meta")
    Rotation(interleaved).rotate(q, k, table, table, transposed)


CASES = {
    "halves": lambda dtype: rotate(dtype),
    "halves backward": lambda dtype: rotate(dtype, transposed=True),
    "halves of a part of the head": lambda dtype: rotate(dtype, rotary_dim=64),
    "halves of a number of heads that is no power of 2": lambda dtype: rotate(dtype, heads=40),
    "interleaved": lambda dtype: rotate(dtype, interleaved=True),
    "interleaved backward": lambda dtype: rotate(dtype, interleaved=True, transposed=True),
    "interleaved of a part of the head": lambda dtype: rotate(dtype, interleaved=True, rotary_dim=64),
}
