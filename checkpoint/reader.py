"""Read and verify ranges of tensors from the files of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ..offload import TensorChunk, round_up
from .archive import MAX_VALUES_BYTES, checksum_of
from .chunk_view import ChunkView, TensorInfo
from .data_file import Blocks, DataFile, EndOfFileError, FileChunk
from .files import CheckpointError, data_name
from .index import Row, RowsByName

_NUM_THREADS = 3
_MAX_FILES = 16  # open at a time: each takes up to three descriptors, of which a process often has 1,024
_BATCH_BYTES = MAX_VALUES_BYTES  # of chunks in a read: a chunk of full size, or several small chunks
_BATCH_BYTES_PAST_CACHE = 16 << 20  # requests must be large: see [Note: past the page cache]
_GAP_BYTES = 64 << 10  # between chunks: a smaller gap costs less to read than to skip
_ALIGNMENT_BYTES = 16  # of values in a buffer: the size of the largest element


@dataclass(frozen=True)
class _Common:
    """The intersection of a stored chunk with a chunk of the view to fill."""

    chunk: TensorChunk
    wanted: TensorChunk  # of the fragment
    offset: int  # of `wanted` in the fragment's memory


@dataclass(frozen=True)
class _Read:
    """A stored chunk and the ranges of a view to fill from it."""

    rank: int  # of the file
    row: Row
    info: TensorInfo
    chunk_view: ChunkView
    common: Sequence[_Common]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk, since its checksum covers all of it."""
        return self.row.chunk.numel * self.info.dtype.itemsize

    @property
    def offset(self) -> int:
        return self.row.values_offset

    def targets(self) -> list[Tensor]:
        """Return the destination of each intersection: its sizes, with dtype and device of the view."""
        values = self.chunk_view.values
        return [
            values[one.offset : one.offset + one.wanted.numel].view(one.wanted.sizes)[
                one.chunk.inside(one.wanted).index
            ]
            for one in self.common
        ]

    def fits(self, targets: Sequence[Tensor]) -> bool:
        """Return True if the chunk's bytes can be read directly into the single target."""
        # The checksum covers the whole chunk, so a part of it cannot be verified in the target.
        if self.common[0].chunk.numel != self.row.chunk.numel:
            return False
        target = targets[0]
        return target.dtype == self.info.dtype and target.device.type == "cpu" and target.is_contiguous()

    def distribute(self, values: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy to the targets. values: (numel,) of the whole chunk."""
        shaped = values.view(self.row.chunk.sizes)
        for one, target in zip(self.common, targets, strict=True):
            target.copy_(shaped[one.chunk.inside(self.row.chunk).index])


class CheckpointReader:
    """The tensors of a checkpoint by name, read chunk by chunk. A `chunk_view.TensorSource`.

    The bytes of a whole chunk go directly into the view. At the edges of a view, or if the dtype changes, they go
    through a buffer of 4 MiB for each thread. A few threads read, so the disk has requests while values are verified.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo], rows: RowsByName) -> None:
        """rows: name -> (rank of the file, row) of each chunk. Every element is in a chunk (`check_coverage`)."""
        self._folder = folder
        self.tensors = dict(tensors)
        self._rows = rows
        self.bytes_read = 0
        self._own = threading.local()  # a buffer for each thread that needs one

    def read(self, chunk_views: Sequence[ChunkView], shared: bool = True) -> None:
        """Fill the views. Raises CheckpointError for a file that is missing, truncated or altered.

        shared: other processes of this host read the same values, so they stay in the page cache. Otherwise uncached
        data are read past it through 3 MiB of blocks, see [Note: past the page cache], except for views in a store.
        """
        in_memory = [
            read for chunk_view in chunk_views if chunk_view.is_in_memory for read in self._reads_of(chunk_view)
        ]
        # The order of the files: requests then move forward, and neighbours are read together.
        in_memory.sort(key=lambda read: (read.rank, read.offset))
        blocks = None if shared or not in_memory else Blocks(_NUM_THREADS)
        for _, of_files in groupby(in_memory, lambda read: read.rank // _MAX_FILES):
            reads = list(of_files)
            batches = _batches_of(reads, _BATCH_BYTES if shared else _BATCH_BYTES_PAST_CACHE)
            with ExitStack() as stack:
                files = stack.enter_context(self._open((read.rank for read in reads), blocks))
                threads = stack.enter_context(ThreadPoolExecutor(_NUM_THREADS, "lowtide checkpoint reader"))
                stack.callback(threads.shutdown, cancel_futures=True)  # after an error, skip the remaining batches
                for done in threads.map(partial(self._read_batch, files), batches):
                    self.bytes_read += done
        # Only a single stored range is open at a time, so stored ranges are filled in their order, by this thread.
        for chunk_view in chunk_views:
            reads = [] if chunk_view.is_in_memory else self._reads_of(chunk_view)
            with self._open(read.rank for read in reads) as files:
                for read in reads:
                    self.bytes_read += self._read_batch(files, [read])

    def verify(self, advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read and verify every chunk. Raises CheckpointError for the first chunk that differs from what was written.

        advance: called with the bytes of each verified chunk.
        """
        by_rank: dict[int, list[tuple[Row, int]]] = {}
        for name, rows in self._rows.items():
            for rank, row in rows:
                info = self.tensors.get(name)
                # Options of parameter groups have no dtype: their archive is the value.
                nbytes = row.nbytes if info is None else row.chunk.numel * info.dtype.itemsize
                by_rank.setdefault(rank, []).append((row, nbytes))
        for rank, members in sorted(by_rank.items()):
            with self._open([rank]) as files:
                for row, nbytes in sorted(members, key=lambda member: member[0].values_offset):
                    self._fill(files[rank], rank, [(row, self._buffer(nbytes).numpy().data)])
                    advance(nbytes)

    # -- batches --------------------------------------------------------------------------------------------------

    def _reads_of(self, chunk_view: ChunkView) -> list[_Read]:
        info = self.tensors[chunk_view.name]
        assert info.shape == chunk_view.shape, chunk_view.name
        chunks, offset = [], 0
        for chunk in chunk_view.chunks():
            chunks.append((chunk, offset))
            offset += chunk.numel
        found = []
        for rank, row in self._rows.get(chunk_view.name, ()):
            stored = row.chunk
            common = [
                _Common(one, chunk, offset) for chunk, offset in chunks if (one := stored.common(chunk)) is not None
            ]
            if common:
                found.append(_Read(rank, row, info, chunk_view, common))
        return found

    @contextmanager
    def _open(self, ranks: Iterable[int], blocks: Blocks | None = None) -> Iterator[dict[int, DataFile]]:
        """Open the files of the ranks, by rank, until the end of the context."""
        files: dict[int, DataFile] = {}
        with ExitStack() as stack:
            for rank in dict.fromkeys(ranks):
                path = self._folder / data_name(rank)
                try:
                    files[rank] = DataFile(path, blocks)
                except OSError as error:
                    raise CheckpointError(
                        f"{path}: expected a file of the checkpoint, found: {error.strerror}"
                    ) from error
                stack.callback(files[rank].close)
            yield files

    def _read_batch(self, files: Mapping[int, DataFile], batch: Sequence[_Read]) -> int:
        """Fill the targets of neighbouring reads in a file. Returns the number of bytes read."""
        rank = batch[0].rank
        targets = [read.targets() for read in batch]
        # A chunk goes directly into its target, or into a piece of this thread's buffer: verified, then distributed.
        fits = [read.fits(target) for read, target in zip(batch, targets, strict=True)]
        # Rounded: a view of bytes as a dtype must begin at a multiple of the element size.
        sizes = [0 if fit else round_up(read.nbytes, _ALIGNMENT_BYTES) for read, fit in zip(batch, fits, strict=True)]
        pieces = torch.split(self._buffer(sum(sizes)), sizes)
        memories = [
            target[0].detach().view(-1).view(torch.uint8) if fit else piece[: read.nbytes]
            for read, target, fit, piece in zip(batch, targets, fits, pieces, strict=True)
        ]
        rows = [(read.row, memory.numpy().data) for read, memory in zip(batch, memories, strict=True)]
        self._fill(files[rank], rank, rows)
        for read, target, fit, memory in zip(batch, targets, fits, memories, strict=True):
            if not fit:
                read.distribute(memory.view(read.info.dtype), target)
        return sum(read.nbytes for read in batch)

    def _buffer(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8, the same memory at every call of a thread."""
        buffer: Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._own.buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes]

    def _fill(self, file: DataFile, rank: int, rows: Sequence[tuple[Row, memoryview]]) -> None:
        """Read the chunks, close together and sorted by offset, into their memory, and verify them."""
        path = self._folder / data_name(rank)
        try:
            file.read([FileChunk(row.values_offset, memory) for row, memory in rows])
        except EndOfFileError as error:
            row, memory = next(one for one in rows if one[0].values_offset + len(one[1]) > error.file_nbytes)
            raise CheckpointError(
                f"{path}: expected {len(memory)} bytes of '{row.name}' at offset {row.values_offset}, found the "
                "end of the file: the file is truncated"
            ) from None
        for row, memory in rows:
            if checksum_of(memory) != row.values_checksum:
                raise CheckpointError(
                    f"{path}: expected the values of '{row.name}' at offset {row.values_offset} as written, "
                    "found different values (the checksum differs): the file is altered"
                )


def _batches_of(reads: Sequence[_Read], max_nbytes: int) -> Iterator[list[_Read]]:
    """Group sorted reads into neighbours of at most max_nbytes, or a single chunk.

    At most _BATCH_BYTES of a batch, or a single chunk, go through a buffer.
    """
    batch: list[_Read] = []
    nbytes = in_buffer = 0
    for read in reads:
        size = round_up(read.nbytes, _ALIGNMENT_BYTES)
        size_in_buffer = 0 if read.fits(read.targets()) else size
        if batch:
            last = batch[-1]
            is_near = read.rank == last.rank and read.offset - last.offset - last.nbytes <= _GAP_BYTES
            if not is_near or nbytes + size > max_nbytes or in_buffer + size_in_buffer > _BATCH_BYTES:
                yield batch
                batch, nbytes, in_buffer = [], 0, 0
        batch.append(read)
        nbytes += size
        in_buffer += size_in_buffer
    if batch:
        yield batch
