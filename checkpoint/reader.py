"""Reads ranges of tensors out of the files of a checkpoint, and verifies what it reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .archive import checksum_of
from .errors import CheckpointError
from .fragment import Fragment, TensorInfo
from .index import Row, data_name

_NUM_THREADS = 3


@dataclass(frozen=True)
class _Stored:
    """A row with the rank in whose file it is, and its place in the flattened tensor."""

    rank: int
    row: Row
    start: int

    @property
    def end(self) -> int:
        return self.start + self.row.box.numel


@dataclass(frozen=True)
class _Read:
    """What of a stored box goes where."""

    stored: _Stored
    info: TensorInfo
    fragment: Fragment


class CheckpointReader:
    """The tensors of a checkpoint by name, read box by box: see `fragment.TensorSource`.

    Where a whole box is wanted as it is, its bytes go straight from the file into the fragment. Otherwise, at the edges
    of a fragment or where the dtype changes, they go through a buffer of one box (4 MiB). A few threads read, so that
    the disk has the next requests while values are verified.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorInfo], rows: Mapping[str, Sequence[tuple[int, Row]]]
    ) -> None:
        """rows: name -> (rank in whose file it is, row) of each box."""
        self._folder = folder
        self._tensors = dict(tensors)
        self._rows = rows
        self._bytes_read = 0
        self._own = threading.local()  # a buffer of one box for each thread that needs one

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    def read(self, fragments: Sequence[Fragment]) -> None:
        """Fills the fragments. Raises CheckpointError for a file that is missing, too short or altered."""
        in_memory = [read for fragment in fragments if fragment.is_in_memory for read in self._reads_of(fragment)]
        in_memory.sort(key=lambda read: (read.stored.rank, read.stored.row.place.values_offset))
        # Of stored ranges one is open at a time: they are filled in the order in which they rest.
        elsewhere = [read for fragment in fragments if not fragment.is_in_memory for read in self._reads_of(fragment)]
        with ExitStack() as stack:
            descriptors: dict[int, int] = {}
            for rank in dict.fromkeys(read.stored.rank for read in (*in_memory, *elsewhere)):
                descriptors[rank] = self._open(rank)
                stack.callback(os.close, descriptors[rank])
            threads = stack.enter_context(ThreadPoolExecutor(_NUM_THREADS, "lowtide checkpoint reader"))
            stack.callback(threads.shutdown, cancel_futures=True)  # after an error the rest is not worth its time
            for done in threads.map(lambda read: self._read_one(descriptors[read.stored.rank], read), in_memory):
                self._bytes_read += done
            for read in elsewhere:
                self._bytes_read += self._read_one(descriptors[read.stored.rank], read)

    def verify(self, advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Reads and verifies every box. Raises CheckpointError for the first that is not as it was written.

        advance: called with the bytes of each box when it is verified.
        """
        by_rank: dict[int, list[tuple[Row, int]]] = {}
        for name, rows in self._rows.items():
            for rank, row in rows:
                info = self._tensors.get(name)
                nbytes = row.place.nbytes if info is None else row.box.numel * info.dtype.itemsize
                by_rank.setdefault(rank, []).append((row, nbytes))
        for rank, members in sorted(by_rank.items()):
            descriptor = self._open(rank)
            try:
                for row, nbytes in sorted(members, key=lambda member: member[0].place.values_offset):
                    advance(self._fill(descriptor, rank, row, self._scratch(nbytes)))
            finally:
                os.close(descriptor)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _reads_of(self, fragment: Fragment) -> list[_Read]:
        info = self._tensors[fragment.name]
        assert info.shape == fragment.shape, fragment.name
        stored = [_Stored(rank, row, row.box.start_in(info.shape)) for rank, row in self._rows.get(fragment.name, ())]
        wanted = [item for item in stored if item.start < fragment.end and fragment.start < item.end]
        covered = sum(min(i.end, fragment.end) - max(i.start, fragment.start) for i in wanted)
        if covered != fragment.numel:
            raise CheckpointError(
                f"{self._folder}: expected elements {fragment.start} to {fragment.end} of '{fragment.name}', found "
                f"{covered} of these {fragment.numel}; an index file does not fit the others"
            )
        return [_Read(item, info, fragment) for item in wanted]

    def _open(self, rank: int) -> int:
        path = self._folder / data_name(rank)
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: expected a file of the checkpoint, found: {error.strerror}") from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor

    def _read_one(self, descriptor: int, read: _Read) -> int:
        """Returns the bytes that were read."""
        stored, fragment = read.stored, read.fragment
        low, high = max(stored.start, fragment.start), min(stored.end, fragment.end)
        target = fragment.values[low - fragment.start : high - fragment.start]
        is_whole = high - low == stored.row.box.numel
        if is_whole and target.dtype == read.info.dtype and target.device.type == "cpu":
            return self._fill(descriptor, stored.rank, stored.row, target.detach().view(torch.uint8))
        values = self._scratch(stored.row.box.numel * read.info.dtype.itemsize)
        done = self._fill(descriptor, stored.rank, stored.row, values)
        target.copy_(values.view(read.info.dtype)[low - stored.start : high - stored.start])
        return done

    def _scratch(self, nbytes: int) -> Tensor:
        buffer: Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._own.buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes]

    def _fill(self, descriptor: int, rank: int, row: Row, memory: Tensor) -> int:
        """memory: (nbytes,) uint8, contiguous, on the CPU. Returns nbytes."""
        place, view = row.place, memory.numpy().data
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], place.values_offset + done)
            if not count:
                raise CheckpointError(
                    f"{self._folder / data_name(rank)}: expected {len(view)} bytes of '{row.name}' at offset "
                    f"{place.values_offset}, found the end of the file: it is truncated"
                )
            done += count
        if checksum_of(view) != place.values_checksum:
            raise CheckpointError(
                f"{self._folder / data_name(rank)}: expected the values of '{row.name}' at offset "
                f"{place.values_offset} as they were written, found others (the checksum differs): the file is altered"
            )
        return done
