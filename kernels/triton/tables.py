"""Tables of tensors on the device: what lets one launch work through many tensors.

A table is (num_fields, width) int64, one column an entry. Its first field is the number of the entry's first program:
programs are dealt out to the entries in order, each a stretch of one entry. Width is a power of two; entries beyond the
last start at no program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ENTRIES = 1024  # of a launch: each program reads where all entries start
_WIDTHS = (16, 128, MAX_ENTRIES)  # few, for each is compiled by itself
_NOWHERE = 2**63 - 1


@triton.jit
def entry_of(program, TABLE_ptr, WIDTH: tl.constexpr):
    """The number of the entry that the program belongs to, and that of the program within it (int64)."""
    starts = tl.load(TABLE_ptr + tl.arange(0, WIDTH))
    entry = tl.sum((starts <= program).to(tl.int32), axis=0) - 1
    return entry, program - tl.load(TABLE_ptr + entry)


def tables(
    num_programs: Sequence[int], fields: Sequence[Sequence[int]], device: torch.device
) -> Iterator[tuple[Tensor, int, int]]:
    """(table, its width, programs) of each launch. num_programs: of each entry, at least 1; fields: values by entry.

    The copy to a GPU is from pinned memory, so that the host does not wait for it.
    """
    for first in range(0, len(num_programs), MAX_ENTRIES):
        counts = num_programs[first : first + MAX_ENTRIES]
        width = next(width for width in _WIDTHS if width >= len(counts))
        starts = [0]
        for count in counts:
            assert count >= 1
            starts.append(starts[-1] + count)
        padding = width - len(counts)
        rows = [starts[:-1] + [_NOWHERE] * padding]
        rows += [[*field[first : first + MAX_ENTRIES], *[0] * padding] for field in fields]
        is_apart = device.type != "cpu" and torch.accelerator.is_available()  # else nothing runs: it is compiled
        on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=is_apart)
        yield on_host.to(device, non_blocking=True), width, starts[-1]
