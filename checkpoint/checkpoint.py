"""One complete checkpoint: what it says of itself, and its tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .coverage import check_coverage
from .errors import CheckpointError
from .fragment import TensorInfo
from .index import FileEntry, LeftOut, Manifest, RankIndex, Row, check_regular, read_regular, rows_by_name
from .names import MANIFEST, data_name, index_name
from .reader import CheckpointReader

MODEL = "model."
STATE = "optim.state."
AVERAGE = "ema."


class Checkpoint:
    """A checkpoint for reading. Raises CheckpointError where a file is missing, of another size, altered, or says what
    cannot be.

    That there is a place for every element is proved before any is read: `weights`, `states`, `own_state` and `verify`
    begin with it. Values are verified as they are read; `verify` reads and verifies all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / MANIFEST)
        for entry in self.manifest.files:
            self._check_size(entry.name, entry.nbytes)

    @property
    def tag(self) -> str:
        return self.manifest.tag

    @property
    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each parameter was computed."""
        return self.manifest.compute_dtypes

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters -> the first name, under which their values are."""
        return self.manifest.aliases

    @property
    def left_out(self) -> dict[str, LeftOut]:
        """Parameters that are not in it, since they did not change, by the model's own names."""
        return self.manifest.left_out

    @property
    def model_files(self) -> dict[str, Any]:
        """Files that belong beside exported weights: name -> JSON content."""
        return self.manifest.model_files

    @property
    def weights(self) -> CheckpointReader:
        """Parameters and buffers by the model's own names."""
        return self._reader(MODEL)

    @property
    def states(self) -> CheckpointReader:
        """Optimizer states, named `parameter.state`."""
        return self._reader(STATE)

    @property
    def averages(self) -> CheckpointReader:
        """Moving averages of parameters, by the model's own names; empty where none were made."""
        return self._reader(AVERAGE)

    @property
    def averaged_weights(self) -> CheckpointReader:
        """As `weights`, with averages in the place of parameters that have one. Raises ValueError where none have."""
        averages, weights = self.averages, self.weights
        if not averages.tensors:
            raise ValueError(f"{self.path}: expected averages in it, found none: the run has not called engine.ema()")
        rows = self._contents[1]
        prefixes = {name: AVERAGE if name in averages.tensors else MODEL for name in weights.tensors}
        tensors = {name: averages.tensors.get(name, info) for name, info in weights.tensors.items()}
        return CheckpointReader(self.path, tensors, {name: rows.get(prefixes[name] + name, ()) for name in tensors})

    def own_state(self, rank: int) -> Any:
        """What the rank said of itself alone, encoded by `values`."""
        return self._contents[0][rank].own_state

    def verify(self, advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Reads every value. Raises CheckpointError for the first that is not as it was written.

        advance: called with the number of bytes that were verified since the last call.
        """
        for entry in self.manifest.files:
            if entry.crc32 is not None:
                self._read_small(entry)
        CheckpointReader(self.path, self.manifest.tensors, self._contents[1]).verify(advance)

    # -- pieces of it ---------------------------------------------------------------------------------------------

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
    def _contents(self) -> tuple[list[RankIndex], Mapping[str, Sequence[tuple[int, Row]]]]:
        """What each rank has written, and all rows by name, which fit each other and the description."""
        entries = {entry.name: entry for entry in self.manifest.files}
        indexes = [self._index(entries[index_name(rank)]) for rank in range(self.manifest.num_files)]
        rows = rows_by_name(indexes)
        try:
            sizes = [entries[data_name(rank)].nbytes for rank in range(len(indexes))]
            check_coverage(self.manifest.tensors, rows, sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}; an index file does not fit the others") from None
        return indexes, rows

    def _index(self, entry: FileEntry) -> RankIndex:
        text = self._read_small(entry)
        try:
            return RankIndex.parse(text)
        except ValueError as error:
            raise CheckpointError(f"{self.path / entry.name}: expected what a rank has written; {error}") from None

    def _read_small(self, entry: FileEntry) -> bytes:
        try:
            text = read_regular(self.path / entry.name)
        except OSError as error:
            raise CheckpointError(
                f"{self.path / entry.name}: expected a file of the checkpoint, found: {error.strerror}"
            ) from error
        if zlib.crc32(text) != entry.crc32:
            raise CheckpointError(
                f"{self.path / entry.name}: expected the file as it was written, found it altered (the CRC-32 differs)"
            )
        return text

    def _reader(self, prefix: str) -> CheckpointReader:
        tensors: dict[str, TensorInfo] = {
            name.removeprefix(prefix): info for name, info in self.manifest.tensors.items() if name.startswith(prefix)
        }
        rows = self._contents[1]
        return CheckpointReader(self.path, tensors, {name: rows.get(prefix + name, ()) for name in tensors})
