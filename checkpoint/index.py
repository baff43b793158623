"""What is where in a checkpoint, as JSON.

    lowtide.json        what was saved: names, shapes, dtypes, step, config, the list of files with their checksums
    rank0.json ...      what rank 0's file holds: a row for each box of a tensor
    __0_0.distcp ...    the boxes, in the format of torch.distributed.checkpoint
    .metadata           the same once more for the readers of torch.distributed.checkpoint, who know no JSON

`lowtide.json` carries a CRC-32 of its own content, and those of the small files; a row has a checksum of its values.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..offload import Box
from .archive import Place
from .errors import CheckpointError
from .fragment import TensorInfo

FORMAT = 1
MANIFEST = "lowtide.json"
DCP_METADATA = ".metadata"


def data_name(rank: int) -> str:
    """The file that a rank writes its boxes to; the name that torch.distributed.checkpoint gives it too."""
    return f"__{rank}_0.distcp"


def index_name(rank: int) -> str:
    """The file that says what is in it."""
    return f"rank{rank}.json"


@dataclass(frozen=True)
class Row:
    """A box of a tensor, and where its archive lies in the file of the rank that wrote it."""

    name: str
    box: Box
    place: Place

    def as_list(self) -> list[Any]:
        place = self.place
        return [
            self.name,
            self.box.offsets,
            self.box.sizes,
            place.offset,
            place.nbytes,
            place.values_offset,
            place.values_checksum,
        ]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Row:
        name, offsets, sizes, *place = values
        return cls(name, Box(tuple(offsets), tuple(sizes)), Place(*place))


@dataclass(frozen=True)
class RankIndex:
    """What one rank's file holds, and what this rank alone knows (its random state, its place in the data)."""

    file_nbytes: int
    rows: tuple[Row, ...]
    own_state: Any  # encoded by `values`

    def write(self, path: Path) -> None:
        content = {
            "file_nbytes": self.file_nbytes,
            "rows": [row.as_list() for row in self.rows],
            "own_state": self.own_state,
        }
        write_durably(path, json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def parse(cls, text: bytes) -> RankIndex:
        content = json.loads(text)
        return cls(content["file_nbytes"], tuple(map(Row.from_list, content["rows"])), content["own_state"])


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint. crc32: of the whole file; None where its rows have checksums of their own."""

    name: str
    nbytes: int
    crc32: int | None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. Tensors go by "model.NAME" and "optim.state.NAME.STATE"."""

    tag: str
    step: int
    saved_at: float  # seconds since 1970
    has_own_tag: bool  # the caller's; such a checkpoint is never deleted to make room
    versions: dict[str, str]
    topology: dict[str, int]  # world_size, stage, shard_size, replicas
    tensors: dict[str, TensorInfo]
    compute_dtypes: dict[str, torch.dtype]  # of the parameters, by their own names
    aliases: dict[str, str]  # further names of tied parameters -> the first name
    training: Any  # what the engine knows beside tensors, encoded by `values`
    config: dict[str, Any]
    model_files: dict[str, Any] = field(default_factory=dict)  # name -> JSON content, to be written beside an export
    files: tuple[FileEntry, ...] = ()

    @property
    def num_files(self) -> int:
        """How many ranks wrote it."""
        return self.topology["world_size"]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)

    def write(self, path: Path) -> None:
        content = {**asdict(self), "format": FORMAT}
        content["tensors"] = {name: [_text(info.dtype), info.shape] for name, info in self.tensors.items()}
        content["compute_dtypes"] = {name: _text(dtype) for name, dtype in self.compute_dtypes.items()}
        text = _canonical(content)
        write_durably(path, b'{"crc32": %d, "content": %s}\n' % (zlib.crc32(text), text))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises CheckpointError where the file is missing, damaged, or of a later format."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path}: expected the description of a checkpoint, found no such file") from None
        try:
            outer = json.loads(text)
            content = outer["content"]
            is_intact = zlib.crc32(_canonical(content)) == outer["crc32"]
        except (ValueError, KeyError, TypeError):
            is_intact = False
        if not is_intact:
            raise CheckpointError(f"{path}: expected a file as it was written, found it truncated or altered")
        if content.pop("format") > FORMAT:
            raise CheckpointError(f"{path}: written by a later version of lowtide; found a format above {FORMAT}")
        content["tensors"] = {
            name: TensorInfo(tuple(shape), getattr(torch, dtype)) for name, (dtype, shape) in content["tensors"].items()
        }
        content["compute_dtypes"] = {name: getattr(torch, text) for name, text in content["compute_dtypes"].items()}
        content["files"] = tuple(FileEntry(**entry) for entry in content["files"])
        return cls(**content)


def write_durably(path: Path, data: bytes) -> None:
    """Writes a small file that is whole as soon as it has its name, and on the disk when this returns."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
