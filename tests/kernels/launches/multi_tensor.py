"""Launches of the cast and scale of many tensors."""

import torch

from lowtide.kernels.triton import multi_tensor

SIZES = (1 << 20, 4096, 77)


def launch(source_dtype: torch.dtype, dtype: torch.dtype, scale: float | torch.Tensor, accumulate: bool) -> None:
    sources = [torch.empty(size, dtype=source_dtype, device="meta") for size in SIZES]
    destinations = [torch.empty(size, dtype=dtype, device="meta") for size in SIZES]
    multi_tensor.copy_scaled(destinations, sources, scale, accumulate)


def fill(dtype: torch.dtype) -> None:
    destinations = [torch.empty(size, dtype=dtype, device="meta") for size in SIZES]
    multi_tensor.copy_scaled(destinations, [None] * len(SIZES), 1.0, False)


ON_DEVICE = torch.empty(1, device="meta")

CASES = {
    "copy": lambda dtype: launch(dtype, dtype, 1.0, False),
    "to float32": lambda dtype: launch(dtype, torch.float32, 1.0, False),
    "from float32": lambda dtype: launch(torch.float32, dtype, 0.5, False),
    "accumulate": lambda dtype: launch(dtype, torch.float32, 1.0, True),
    "accumulate, scaled": lambda dtype: launch(dtype, dtype, ON_DEVICE, True),
    "zeros": fill,
}
NOT_VECTORIZED = {"zeros": "nothing is read but the table"}
