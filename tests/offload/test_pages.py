"""Pages move from buffer to buffer: what a buffer holds is its own, what it vacated is used again or given back."""

import subprocess
import sys

import pytest
import torch

from lowtide.offload import PagedBuffer, PagePool, TransientBuffer
from lowtide.offload.pages import PAGE_BYTES

pytestmark = pytest.mark.skipif(not PagePool.is_possible(), reason="pages cannot be moved on this system")

NUMEL = 3 * PAGE_BYTES // 4 + 5  # float32: three whole pages and a bit


def vacated_bytes(pool: PagePool) -> int:
    return sum(nbytes for _, nbytes in pool._vacated)


def test_vacated_pages_are_taken_by_the_next_buffer_and_kept_parts_stay() -> None:
    pool = PagePool()
    first, second = (PagedBuffer(pool, 4 * NUMEL, torch.float32) for _ in range(2))
    first.populate(0, 4 * NUMEL)
    first.tensor.copy_(torch.arange(4.0 * NUMEL))
    first.vacate(NUMEL, 3 * NUMEL)
    vacated = vacated_bytes(pool)
    assert 0 < vacated <= 2 * NUMEL * 4 and vacated % PAGE_BYTES == 0
    second.populate(NUMEL, 3 * NUMEL)
    assert vacated_bytes(pool) == 0
    second.tensor[NUMEL : 3 * NUMEL] = -1.0
    kept = torch.cat([first.tensor[:NUMEL], first.tensor[3 * NUMEL :]])
    assert torch.equal(kept, torch.cat([torch.arange(1.0 * NUMEL), torch.arange(3.0 * NUMEL, 4.0 * NUMEL)]))


def test_a_buffer_that_is_populated_again_first_keeps_its_content() -> None:
    pool = PagePool()
    buffer = PagedBuffer(pool, NUMEL, torch.float32)
    buffer.tensor.fill_(3.0)
    buffer.vacate(0, NUMEL)
    buffer.populate(0, NUMEL)
    assert vacated_bytes(pool) == 0 and torch.equal(buffer.tensor, torch.full((NUMEL,), 3.0))


def test_a_part_that_was_vacated_alone_stays_with_the_whole_that_is_populated() -> None:
    pool = PagePool()
    numel = 8 * PAGE_BYTES // 4
    first, second = (PagedBuffer(pool, numel, torch.float32) for _ in range(2))
    first.populate(numel // 4, numel // 2)
    first.vacate(numel // 4, numel // 2)
    first.populate(0, numel)  # takes back what has not left, and leaves nothing of it to others
    first.tensor.fill_(5.0)
    second.populate(0, numel)
    second.tensor.fill_(6.0)
    assert torch.equal(first.tensor, torch.full((numel,), 5.0))
    assert vacated_bytes(pool) == 0


def test_the_smallest_range_that_suffices_is_taken() -> None:
    pool = PagePool()
    buffers = {pages: PagedBuffer(pool, pages * PAGE_BYTES, torch.uint8) for pages in (4, 2, 1)}
    for pages, buffer in buffers.items():
        buffer.tensor.fill_(pages)
        buffer.vacate(0, pages * PAGE_BYTES)
    taker = PagedBuffer(pool, 2 * PAGE_BYTES, torch.uint8)
    taker.populate(0, 2 * PAGE_BYTES)
    assert taker.tensor.tolist() == [2] * (2 * PAGE_BYTES)  # its pages came with what they held


def test_a_dropped_buffer_reads_as_zero_and_can_be_written_again() -> None:
    buffer = TransientBuffer(4 * PAGE_BYTES, torch.uint8)
    buffer.tensor.fill_(7)
    buffer.drop()
    assert int(buffer.tensor.sum()) == 0
    buffer.tensor.fill_(7)
    assert int(buffer.tensor.sum()) == 7 * 4 * PAGE_BYTES


def test_a_buffer_can_be_read_until_the_process_ends() -> None:
    """Python calls the callbacks of `atexit` in reverse: the first is called after all finalizers."""
    script = """
import atexit

atexit.register(lambda: print(int(buffer.tensor.sum())))

import torch

from lowtide.offload import TransientBuffer

buffer = TransientBuffer(10_000, torch.uint8)
buffer.tensor.fill_(1)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "10000\n"), ended.stderr
