"""What is freed at the end of the heap stays there for the next tensors."""

import platform
import resource

import pytest
import torch

from lowtide.offload import keep_heap
from tests.kit.ranks import in_a_new_process


def faults() -> int:
    """Of a round, the median of twelve."""
    keep_heap()
    counts = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.empty(100 << 10, dtype=torch.uint8).fill_(1) for _ in range(160)]
        del blocks
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(counts)[len(counts) // 2]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
def test_freed_memory_is_faulted_in_once() -> None:
    """160 blocks of 100 KiB are 4000 pages: below what is mapped by itself, above what is given back at once.

    Without the call the count is 2000 to 4000, unless the imports have freed a large block before.
    """
    assert in_a_new_process(faults) < 100
