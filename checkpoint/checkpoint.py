"""One complete checkpoint: what it says of itself, and its tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .fragment import TensorInfo
from .index import MANIFEST, FileEntry, Manifest, RankIndex, Row, index_name
from .reader import CheckpointReader

MODEL = "model."
STATE = "optim.state."


class Checkpoint:
    """A checkpoint for reading. Raises CheckpointError where a file is missing, of another size, or altered.

    Values of tensors are verified as they are read; `verify` reads and verifies all.
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

    def own_state(self, rank: int) -> Any:
        """What the rank said of itself alone, encoded by `values`."""
        return self._indexes[rank].own_state

    def verify(self, advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Reads every value. Raises CheckpointError for the first that is not as it was written.

        advance: called with the number of bytes that were verified since the last call.
        """
        for entry in self.manifest.files:
            if entry.crc32 is not None:
                self._read_small(entry)
        CheckpointReader(self.path, self.manifest.tensors, self._rows("")).verify(advance)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _check_size(self, name: str, nbytes: int) -> None:
        file = self.path / name
        try:
            found = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file}: expected a file of {nbytes} bytes, found: {error.strerror}") from error
        if found != nbytes:
            kind = "truncated" if found < nbytes else "altered"
            raise CheckpointError(f"{file}: expected {nbytes} bytes, found {found}: the file is {kind}")

    @cached_property
    def _indexes(self) -> list[RankIndex]:
        entries = {entry.name: entry for entry in self.manifest.files}
        return [RankIndex.parse(self._read_small(entries[index_name(rank)])) for rank in range(self.manifest.num_files)]

    def _read_small(self, entry: FileEntry) -> bytes:
        text = (self.path / entry.name).read_bytes()
        if zlib.crc32(text) != entry.crc32:
            raise CheckpointError(
                f"{self.path / entry.name}: expected the file as it was written, found it altered (the CRC-32 differs)"
            )
        return text

    def _rows(self, prefix: str) -> dict[str, list[tuple[int, Row]]]:
        rows: dict[str, list[tuple[int, Row]]] = {}
        for rank, index in enumerate(self._indexes):
            for row in index.rows:
                if row.name.startswith(prefix):
                    rows.setdefault(row.name.removeprefix(prefix), []).append((rank, row))
        return rows

    def _reader(self, prefix: str) -> CheckpointReader:
        tensors: dict[str, TensorInfo] = {
            name.removeprefix(prefix): info for name, info in self.manifest.tensors.items() if name.startswith(prefix)
        }
        return CheckpointReader(self.path, tensors, self._rows(prefix))
