"""Sums in rank order: the same bits wherever the tensor is cut."""

from itertools import pairwise

import pytest
import torch

from lowtide.comm.axis import REGION_ALIGNMENT_NUMEL, regions_of
from lowtide.zero.codec import CHUNK_NUMEL, sum_in_rank_order


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_are_added_in_order_wherever_the_cut_is(dtype: torch.dtype, count: int, accumulate: bool) -> None:
    numel, generator = CHUNK_NUMEL + 77, torch.Generator().manual_seed(count)
    parts = [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]
    start = torch.randn(numel, generator=generator).to(torch.promote_types(dtype, torch.float32))
    expected = start.clone() if accumulate else torch.zeros_like(start)
    for part in parts:
        expected = expected + part.to(start.dtype)
    for cut in (0, 12_345):
        out = start.clone()
        for piece in (slice(0, cut), slice(cut, numel)):
            sum_in_rank_order([part[piece] for part in parts], out[piece], accumulate)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 5000, 8192, 100_001])
def test_regions_are_whole_blocks_and_cover_everything_once(numel: int, size: int) -> None:
    regions = regions_of(numel, size)
    assert len(regions) == size and regions[0].start == 0 and regions[-1].stop == numel
    assert all(region.start == before.stop for before, region in pairwise(regions))
    assert all(region.start % REGION_ALIGNMENT_NUMEL == 0 or region.start == numel for region in regions)
