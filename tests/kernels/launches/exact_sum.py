"""Launches of the exact sum."""

import torch

from lowtide.kernels.triton import exact_sum


def add(dtype: torch.dtype) -> None:
    sums = torch.empty(145, dtype=torch.int64, device="meta")
    exact_sum.add_limbs(sums, torch.empty(5000, dtype=dtype, device="meta"), 0, 144)


CASES = {"limbs": add}
DTYPES = (torch.float64,)
NOT_VECTORIZED = {"limbs": "a few values of a length that is not known"}
