"""Launches of the sums of squares by block."""

import torch

from lowtide.kernels.triton import sum_of_squares


def launch(dtype: torch.dtype, size: int, has_flag: bool = False, block_numel: int = 1024) -> None:
    flag = torch.empty(1, dtype=torch.int32, device="meta") if has_flag else None
    sum_of_squares.squares_by_block(torch.empty(size, dtype=dtype, device="meta"), block_numel, flag)


CASES = {
    "flat": lambda dtype: launch(dtype, 1 << 20),
    "flat with a flag": lambda dtype: launch(dtype, 1 << 20, True),
    "one block": lambda dtype: launch(dtype, 1024),
    "a part of a block": lambda dtype: launch(dtype, 1000),
    "more than 2^32 elements": lambda dtype: launch(dtype, 1 << 33),
    "short blocks": lambda dtype: launch(dtype, 1 << 20, True, 16),
    "long blocks": lambda dtype: launch(dtype, 1 << 20, True, 4096),
}
