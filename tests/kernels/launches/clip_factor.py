"""Launches of what an update on the device is told."""

import torch

from lowtide.kernels.triton import sum_of_squares


def clip(clips_below: bool, dtype: torch.dtype) -> None:
    sums = torch.empty(150, dtype=dtype, device="meta")
    sum_of_squares.clip_factor(sums, 144, (148, 3), 0.25, 1.0, clips_below, 1e-6)


CASES = {"above": lambda dtype: clip(False, dtype), "below": lambda dtype: clip(True, dtype)}
DTYPES = (torch.int64,)
NOT_VECTORIZED = dict.fromkeys(CASES, "a few numbers")
