"""A complete checkpoint: its description, its tensors, and the proof that every element is stored exactly once."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..offload import TensorChunk
from .archive import MAX_VALUES_BYTES
from .chunk_view import TensorInfo
from .dcp import PARAM_GROUPS
from .files import MANIFEST, CheckpointError, check_regular, data_name, index_name, read_regular, shortened
from .index import FileEntry, Manifest, RankIndex, Row, RowsByName, rows_by_name
from .reader import CheckpointReader

MODEL = "model."
STATE = "optim.state."
AVERAGE = "ema."


class Checkpoint:
    """A checkpoint for reading.

    Raises CheckpointError if a file is missing, has another size, is altered, or has impossible content. `weights`,
    `states`, `own_state` and `verify` first prove that every element has a place. Values are verified when they are
    read; `verify` reads and verifies all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / MANIFEST)
        for entry in self.manifest.files:
            # A truncated file is found before the caller changes anything, for the cost of a `stat`.
            self._check_size(entry.name, entry.nbytes)

    @property
    def weights(self) -> CheckpointReader:
        """Parameters and buffers by model names."""
        return self._reader(MODEL)

    @property
    def states(self) -> CheckpointReader:
        """Optimizer states, named `parameter.state`."""
        return self._reader(STATE)

    @property
    def averages(self) -> CheckpointReader:
        """Moving averages of parameters by model names. Empty if the run made none."""
        return self._reader(AVERAGE)

    @property
    def averaged_weights(self) -> CheckpointReader:
        """`weights` with averages in place of parameters that have one. Raises ValueError if there are no averages."""
        averages, weights = self.averages, self.weights
        if not averages.tensors:
            raise ValueError(f"{self.path}: expected moving averages, found none: the run has not called engine.ema()")
        rows = self._contents[1]
        prefixes = {name: AVERAGE if name in averages.tensors else MODEL for name in weights.tensors}
        tensors = {name: averages.tensors.get(name, info) for name, info in weights.tensors.items()}
        return CheckpointReader(self.path, tensors, {name: rows.get(prefixes[name] + name, ()) for name in tensors})

    def own_state(self, rank: int) -> Any:
        """Return the state of this rank alone, encoded by `values`."""
        return self._contents[0][rank].own_state

    def verify(self, advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read every value. Raises CheckpointError for the first value that differs from what was written.

        advance: called with the number of bytes verified since the last call.
        """
        for entry in self.manifest.files:
            # Each chunk of a data file has a checksum, and is verified below.
            if entry.crc32 is not None:
                self._read_small(entry)
        CheckpointReader(self.path, self.manifest.tensors, self._contents[1]).verify(advance)

    # -- reading the description ----------------------------------------------------------------------------------

    def _check_size(self, name: str, nbytes: int) -> None:
        file = self.path / name
        try:
            status = file.stat()
            check_regular(status, file)
        except OSError as error:
            raise CheckpointError(f"{file}: expected a file of {nbytes} bytes, found: {error.strerror}") from error
        found = status.st_size
        if found != nbytes:
            kind = "truncated" if found < nbytes else "altered"
            raise CheckpointError(f"{file}: expected {nbytes} bytes, found {found}: the file is {kind}")

    @cached_property
    def _contents(self) -> tuple[list[RankIndex], RowsByName]:
        """The index of each rank, and all rows by name, checked against each other and the description."""
        entries = {entry.name: entry for entry in self.manifest.files}
        indexes = [self._index(entries[index_name(rank)]) for rank in range(self.manifest.num_files)]
        rows = rows_by_name(indexes)
        try:
            sizes = [entries[data_name(rank)].nbytes for rank in range(len(indexes))]
            check_coverage(self.manifest.tensors, rows, sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}; the index files do not fit together") from None
        return indexes, rows

    def _index(self, entry: FileEntry) -> RankIndex:
        text = self._read_small(entry)
        try:
            return RankIndex.from_json(text)
        except ValueError as error:
            raise CheckpointError(f"{self.path / entry.name}: expected the index of a rank; {error}") from None

    def _read_small(self, entry: FileEntry) -> bytes:
        try:
            text = read_regular(self.path / entry.name)
        except OSError as error:
            raise CheckpointError(
                f"{self.path / entry.name}: expected a file of the checkpoint, found: {error.strerror}"
            ) from error
        if zlib.crc32(text) != entry.crc32:
            raise CheckpointError(
                f"{self.path / entry.name}: expected the file as written, found it altered (the CRC-32 differs)"
            )
        return text

    def _reader(self, prefix: str) -> CheckpointReader:
        tensors: dict[str, TensorInfo] = {
            name.removeprefix(prefix): info for name, info in self.manifest.tensors.items() if name.startswith(prefix)
        }
        rows = self._contents[1]
        return CheckpointReader(self.path, tensors, {name: rows.get(prefix + name, ()) for name in tensors})


# -- proof that the rows of all ranks are the tensors -----------------------------------------------------------------


def check_coverage(tensors: Mapping[str, TensorInfo], rows: RowsByName, file_sizes: Sequence[int]) -> None:
    """Raise ValueError, with a tensor and an element, unless the rows of all ranks are complete and sound.

    Each chunk lies in its tensor. The chunks of a tensor cover every element exactly once. Their bytes lie in their
    archives, and the archives in the files. file_sizes: bytes of the file of each rank.
    """
    for name, found in rows.items():
        info = tensors.get(name)
        # Options of parameter groups are pickles in the file, and no tensors: only torch's readers use them.
        if info is None and not name.startswith(PARAM_GROUPS):
            raise ValueError(f"an index has rows of {shortened(name)}, which the description does not name")
        for rank, row in found:
            _check_place(row, info, file_sizes[rank], rank)
    for name, info in tensors.items():
        _check_elements(name, info, rows.get(name, ()))


def _check_place(row: Row, info: TensorInfo | None, file_nbytes: int, rank: int) -> None:
    # All numbers are from a file: a reader takes memory for `nbytes`, and reads them at `values_offset`.
    # Only options, such as the names of a group's parameters, may be larger than a chunk: no tensor has them.
    nbytes, limit = row.nbytes, file_nbytes
    if info is not None:
        nbytes, limit = row.chunk.numel * info.dtype.itemsize, MAX_VALUES_BYTES
    values_end, end = row.values_offset + nbytes, row.offset + row.nbytes
    if not (row.offset <= row.values_offset and values_end <= end <= file_nbytes and nbytes <= limit):
        raise ValueError(
            f"the index of rank {rank} says that {nbytes} bytes of {shortened(row.name)} are at {row.values_offset}, "
            f"in an archive from {row.offset} to {end}, in a file of {file_nbytes} bytes; expected at most "
            f"{limit} bytes for a chunk, within its archive"
        )


def _check_elements(name: str, info: TensorInfo, rows: Sequence[tuple[int, Row]]) -> None:
    for rank, row in rows:
        if not row.chunk.lies_in(info.shape):
            raise ValueError(
                f"the index of rank {rank} has a chunk of {shortened(name)} at {row.chunk.offsets} of sizes "
                f"{row.chunk.sizes}, which is no part of its shape {info.shape}"
            )
    chunks = [row.chunk for _, row in rows]
    # Most tensors are written as flat ranges: to sort their starts suffices.
    if all(chunk.is_range_of(info.shape) for chunk in chunks):
        problem = _gap_between_ranges(chunks, info.shape)
    else:
        problem = _gap_between_chunks(chunks, info.shape)
    if problem is not None:
        raise ValueError(f"expected each element of {shortened(name)} once, found {problem}")


def _gap_between_ranges(chunks: Sequence[TensorChunk], shape: tuple[int, ...]) -> str | None:
    covered = 0
    for start, numel in sorted((chunk.start_in(shape), chunk.numel) for chunk in chunks):
        if start != covered:
            return f"element {min(start, covered)} " + ("in two rows" if start < covered else "in none")
        covered = start + numel
    return None if covered == math.prod(shape) else f"element {covered} in none"


def _gap_between_chunks(chunks: Sequence[TensorChunk], shape: tuple[int, ...]) -> str | None:
    """Find a gap or an overlap between chunks that are not ranges, such as columns of a split layer.

    No two chunks share an element, and together they have as many elements as the tensor.
    """
    open_chunks: list[TensorChunk] = []  # chunks that extend to the first row of the current chunk
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        # A chunk of a scalar is a range, so each chunk here has a first dimension.
        open_chunks = [other for other in open_chunks if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in open_chunks:
            common = chunk.common(other)
            if common is not None:
                return f"element {common.start_in(shape)} in two rows"
        open_chunks.append(chunk)
    # The chunks lie in the tensor and share no element, so a count of their elements shows a gap.
    covered, numel = sum(chunk.numel for chunk in chunks), math.prod(shape)
    return None if covered == numel else f"{covered} of its {numel} elements in rows"
