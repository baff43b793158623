"""Launches of the exact sum."""

import torch

from lowtide.kernels.triton import sum_of_squares


def add(dtype: torch.dtype) -> None:
    sums = torch.empty(145, dtype=torch.int64, device="meta")
    sum_of_squares.add_limbs(sums, torch.empty(5000, dtype=dtype, device="meta"), 0, 144)


CASES = {"limbs": add}
DTYPES = (torch.float64,)
NOT_VECTORIZED = {"limbs": "a few values of a length that is not known"}
