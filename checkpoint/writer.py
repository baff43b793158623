"""Write the part of a checkpoint that a rank holds: its chunks, and their index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..offload import HostPool, SequentialFile, TensorChunk, TransientBuffer, round_up, use_device
from .archive import MAX_VALUES_BYTES, checksum_of, write_tensor
from .chunk_view import ChunkView
from .files import data_name, index_name
from .index import RankIndex, Row

_ALIGNMENT_BYTES = 64


def write_part(
    folder: Path, rank: int, chunk_views: Sequence[ChunkView], blobs: Sequence[tuple[str, bytes]], own_state: Any
) -> None:
    """Write the file of a rank directly from its views. Takes three blocks of 4 MiB beside them.

    blobs: (name, bytes) that readers of torch.distributed.checkpoint expect beside the tensors. The index is written
    last: if it exists, the file is complete and on the disk. Raises OSError.
    """
    rows: list[Row] = []
    with SequentialFile(folder / data_name(rank)) as file:
        for chunk_view in chunk_views:
            for chunk, values in _chunks_of(chunk_view):
                place = write_tensor(file, _bytes_of(values), values.dtype, chunk.sizes)
                rows.append(Row(chunk_view.name, chunk.offsets, chunk.sizes, *place))
        for name, blob in blobs:
            rows.append(Row(name, (), (), file.nbytes, len(blob), file.nbytes, checksum_of(memoryview(blob))))
            file.write(blob)
    # After the `with`: the data file is on the disk when the index appears.
    RankIndex(file_nbytes=file.nbytes, rows=tuple(rows), own_state=own_state).write(folder / index_name(rank))


class Snapshot:
    """A copy of chunk views in host memory, so training continues while they are written.

    All copies are in a buffer. On the CPU its memory returns to the system at the end. For a device it is pinned memory
    of the pool, which keeps it for the next snapshot. Device copies run on the current stream: training may change the
    tensors after them, and the host does not wait.
    """

    def __init__(self, chunk_views: Sequence[ChunkView], pool: HostPool | None, device: torch.device) -> None:
        """pool: of pinned memory; None if the views are in host memory."""
        # Each view begins at a multiple of every element size, as a view of bytes as a dtype must.
        sizes = [round_up(chunk_view.nbytes, _ALIGNMENT_BYTES) for chunk_view in chunk_views]
        if pool is None:
            transient = TransientBuffer(sum(sizes), torch.uint8)
            memory, self._give_back = transient.tensor, transient.drop
        else:
            memory = pool.take(sum(sizes))
            self._give_back = partial(pool.give, memory)
        self._device = device
        self.chunk_views: list[ChunkView] = []
        try:
            self._copy(chunk_views, sizes, memory)
        except BaseException:
            self.drop()
            raise
        # An event, not the stream: training goes on in the stream while the writing thread waits.
        self._copied = None if pool is None else torch.accelerator.current_stream(device).record_event()

    def _copy(self, chunk_views: Sequence[ChunkView], sizes: Sequence[int], memory: Tensor) -> None:
        offset = 0
        for chunk_view, size in zip(chunk_views, sizes, strict=True):
            part = memory[offset : offset + chunk_view.nbytes].view(chunk_view.dtype)
            part.copy_(chunk_view.values, non_blocking=True)
            self.chunk_views.append(replace(chunk_view, memory=part))
            offset += size

    def wait(self) -> None:
        """Wait until the copies are complete. For the writing thread."""
        use_device(self._device)
        if self._copied is not None:
            self._copied.synchronize()

    def drop(self) -> None:
        """Free the memory."""
        self.chunk_views.clear()
        self._give_back()


def _chunks_of(chunk_view: ChunkView) -> Iterator[tuple[TensorChunk, Tensor]]:
    values = chunk_view.values
    max_numel = MAX_VALUES_BYTES // values.dtype.itemsize
    offset = 0
    for chunk in chunk_view.chunks(max_numel):
        yield chunk, values[offset : offset + chunk.numel]
        offset += chunk.numel


def _bytes_of(values: Tensor) -> memoryview:
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().data
