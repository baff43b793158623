"""How a file is divided among keys, and which bytes a checksum tells apart. Integers only, no file."""

import random

import pytest
import torch

from lowtide.offload.block_file import SECTOR_BYTES, Checksum
from lowtide.offload.file_store import FileSpace


def test_regions_never_overlap_and_free_neighbours_become_one() -> None:
    regions, chance = FileSpace(4096), random.Random(0)
    taken: dict[int, int] = {}  # size by offset
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            offset = chance.choice(sorted(taken))
            regions.give(offset, taken.pop(offset))
        else:
            nbytes = chance.randint(1, 40_000)
            offset = regions.take(nbytes)
            assert offset % 4096 == 0
            taken[offset] = nbytes
        ends = [offset + regions.rounded(nbytes) for offset, nbytes in sorted(taken.items())]
        assert all(end <= offset for end, offset in zip(ends, sorted(taken)[1:], strict=False))
        assert regions.end == max(ends, default=0)
        assert regions.free_bytes == regions.end - sum(map(regions.rounded, taken.values()))
    for offset, nbytes in taken.items():
        regions.give(offset, nbytes)
    assert regions.end == regions.free_bytes == 0


def test_the_smallest_gap_that_suffices_is_used() -> None:
    regions = FileSpace(4096)
    offsets = {nbytes: regions.take(nbytes) for nbytes in (40960, 4096, 8192, 4095, 20480, 100)}
    for nbytes in (40960, 8192, 20480):
        regions.give(offsets[nbytes], nbytes)
    assert regions.take(8000) == offsets[8192]
    assert regions.take(8193) == offsets[20480]
    assert regions.take(8192) == offsets[20480] + 12288  # what that left
    assert regions.take(50_000) == offsets[100] + 4096  # at the end


def test_an_empty_region_takes_nothing() -> None:
    regions = FileSpace(4096)
    regions.give(regions.take(0), 0)
    assert regions.end == 0


BLOCK_BYTES = 5 * SECTOR_BYTES + 803  # whole sectors, words beyond them, bytes beyond those


def block(seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(BLOCK_BYTES))


def test_any_byte_that_changes_changes_the_checksum() -> None:
    checksum = Checksum(1 << 16)
    data = block(0)
    expected = checksum.of(memoryview(data))
    for index in range(BLOCK_BYTES):
        data[index] ^= 1 << index % 8
        assert checksum.of(memoryview(data)) != expected
        data[index] ^= 1 << index % 8
    assert checksum.of(memoryview(data)) == expected


@pytest.mark.parametrize("sector", range(5))
def test_lost_and_misplaced_sectors_change_the_checksum(sector: int) -> None:
    checksum = Checksum(1 << 16)
    data, old = block(1), block(2)
    expected = checksum.of(memoryview(data))
    here = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
    next_one = slice((sector + 1) % 5 * SECTOR_BYTES, ((sector + 1) % 5 + 1) * SECTOR_BYTES)
    for other in (old[here], bytes(SECTOR_BYTES), data[next_one]):
        changed = bytearray(data)
        changed[here] = other
        assert checksum.of(memoryview(changed)) != expected
    swapped = bytearray(data)
    swapped[here], swapped[next_one] = data[next_one], data[here]
    assert checksum.of(memoryview(swapped)) != expected


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4095, 4096, 4097, 1 << 16])
def test_the_checksum_does_not_depend_on_the_address(nbytes: int) -> None:
    checksum = Checksum(1 << 16)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()
    sums = {checksum.of(memoryview(bytearray(skipped) + data)[skipped:]) for skipped in (0, 1, 3, 8)}
    assert len(sums) == 1
