"""The layout of a checkpoint, as JSON.

    lowtide.json        the description: names, shapes, dtypes, step, config, the list of files with their checksums
    rank0.json ...      the index of rank 0's file: a row for each chunk of a tensor
    __0_0.distcp ...    the chunks, in the format of torch.distributed.checkpoint
    .metadata           the layout again, for readers of torch.distributed.checkpoint

`lowtide.json` has a CRC-32 of its content and of the small files. A row has a checksum of its values. They detect
faults of disks. Against malicious files, all values are checked for type and bounds when they are read (`FileContent`),
all names for their paths (`files`), and all rows for covering the tensors (`check_coverage`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..offload import TensorChunk
from .archive import ArchivePlace
from .chunk_view import TensorInfo, dtype_named
from .files import (
    DCP_METADATA,
    CheckpointError,
    check_model_file,
    check_tag,
    data_name,
    index_name,
    read_regular,
    shortened,
    write_durably,
)
from .values import check_depth

FORMAT = 1

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
_Checksum = Annotated[int, Field(strict=True, ge=0, lt=1 << 64)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
_TOPOLOGY = frozenset({"world_size", "stage", "shard_size", "replicas"})
LAST_MOMENT = 1 << 37  # seconds since 1970: the limit of `datetime`
_Seconds = Annotated[float, Field(strict=True, ge=0, lt=LAST_MOMENT)]


class FileContent(BaseModel):
    """An object from a file with checked types. Unknown keys, from later versions, are ignored."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def parse(cls, content: Any) -> Any:
        """Raise ValueError with the place of the first fault."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ValueError(first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """Describe the first fault: place, expectation, and finding."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(shortened(part)[1:-1] if isinstance(part, str) else str(part) for part in fault["loc"])
    return f"{place or 'content'}: {fault['msg']}, found {shortened(fault['input'])}"


# -- the index of a rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A chunk of a tensor, and the place of its archive in the file of the rank that wrote it."""

    name: str
    chunk: TensorChunk
    place: ArchivePlace

    def as_list(self) -> list[Any]:
        place = self.place
        return [
            self.name,
            self.chunk.offsets,
            self.chunk.sizes,
            place.offset,
            place.nbytes,
            place.values_offset,
            place.values_checksum,
        ]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Row:
        name, offsets, sizes, *place = values
        return cls(name, TensorChunk(tuple(offsets), tuple(sizes)), ArchivePlace(*place))


_RowContent = tuple[Text, tuple[Count, ...], tuple[Count, ...], Count, Count, Count, _Checksum]


class _IndexContent(FileContent):
    file_nbytes: Count
    rows: list[_RowContent]
    own_state: Any


@dataclass(frozen=True)
class RankIndex:
    """The content of a rank's file, and state of this rank alone, such as its random state."""

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
        """Raise ValueError if it is not consistent in itself."""
        content: _IndexContent = _IndexContent.parse(_parsed(text))
        check_depth(content.own_state, "own_state")
        return cls(content.file_nbytes, tuple(map(Row.from_list, content.rows)), content.own_state)


RowsByName = Mapping[str, Sequence[tuple[int, Row]]]
"""The chunks of each tensor, each with the rank of its file."""


def rows_by_name(ranks: Sequence[RankIndex]) -> RowsByName:
    """Collect the rows of all ranks."""
    rows: dict[str, list[tuple[int, Row]]] = {}
    for rank, index in enumerate(ranks):
        for row in index.rows:
            rows.setdefault(row.name, []).append((rank, row))
    return rows


# -- the description of the checkpoint --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOut:
    """A frozen parameter that is stored elsewhere. digest: of its values, 16 hex digits."""

    info: TensorInfo
    digest: str


class FileEntry(FileContent):
    """A file of the checkpoint. crc32: of the whole file, or None if its rows have checksums."""

    name: Text
    nbytes: Count
    crc32: Count | None


class _ManifestContent(FileContent):
    format: Count
    tag: Text
    step: Count
    saved_at: _Seconds
    has_own_tag: Flag
    versions: dict[str, Text]
    topology: dict[str, Count]
    tensors: dict[str, tuple[Text, tuple[Count, ...]]]
    compute_dtypes: dict[str, Text]
    aliases: dict[str, Text]
    training: Any
    config: dict[str, Any]
    model_files: dict[str, Any]
    files: tuple[FileEntry, ...]
    left_out: dict[str, tuple[Text, tuple[Count, ...], Text]] = {}


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. Tensors are named "model.NAME", "optim.state.NAME.STATE" and "ema.NAME"."""

    tag: str
    step: int
    saved_at: float  # seconds since 1970, later than the checkpoint before it
    has_own_tag: bool  # the caller chose the tag: the checkpoint is never deleted to make room
    versions: dict[str, str]
    topology: dict[str, int]  # world_size, stage, shard_size, replicas
    tensors: dict[str, TensorInfo]
    compute_dtypes: dict[str, torch.dtype]  # of the parameters, by model names
    aliases: dict[str, str]  # further names of tied parameters -> the first name
    training: Any  # state of the engine besides tensors, encoded by `values`
    config: dict[str, Any]
    model_files: dict[str, Any] = field(default_factory=dict)  # name -> JSON content, written beside an export
    files: tuple[FileEntry, ...] = ()
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # frozen parameters stored elsewhere, by model names

    @property
    def num_files(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return self.topology["world_size"]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)

    def write(self, path: Path) -> None:
        """Raise OSError, or ValueError for content that could not be read again."""
        content = {**asdict(self), "format": FORMAT}
        content["tensors"] = {name: [_text(info.dtype), info.shape] for name, info in self.tensors.items()}
        content["compute_dtypes"] = {name: _text(dtype) for name, dtype in self.compute_dtypes.items()}
        content["left_out"] = {
            name: [_text(one.info.dtype), one.info.shape, one.digest] for name, one in self.left_out.items()
        }
        content["files"] = [dict(entry) for entry in self.files]
        text = _canonical(content)
        self._parse(json.loads(text))
        write_durably(path, b'{"crc32": %d, "content": %s}\n' % (zlib.crc32(text), text))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raise CheckpointError if the file is missing, damaged, of a later format, or has impossible content."""
        try:
            text = read_regular(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: expected the description of a checkpoint, found no such file") from None
        except OSError as error:
            raise CheckpointError(f"{path}: expected the description of a checkpoint: {error.strerror}") from error
        try:
            outer = _parsed(text)
            content = outer["content"]
            is_intact = zlib.crc32(_canonical(content)) == outer["crc32"]
            found = content["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_intact = False
        if not is_intact:
            raise CheckpointError(f"{path}: expected the file as written, found it truncated or altered")
        if isinstance(found, int) and found > FORMAT:
            raise CheckpointError(
                f"{path}: expected a format of at most {FORMAT}, found a format of a later version. Update lowtide."
            )
        try:
            return cls._parse(content)
        except ValueError as error:
            raise CheckpointError(f"{path}: expected the description of a checkpoint; {error}") from None

    @classmethod
    def _parse(cls, found: Any) -> Manifest:
        """Raise ValueError with the place of the fault."""
        content: _ManifestContent = _ManifestContent.parse(found)
        check_tag(content.tag)
        for name in content.model_files:
            check_model_file(name)
        check_depth([content.training, content.config, content.model_files], "training, config or model_files")
        tensors = {
            name: TensorInfo(shape, dtype_named(dtype, name)) for name, (dtype, shape) in content.tensors.items()
        }
        compute_dtypes = {name: dtype_named(text, name) for name, text in content.compute_dtypes.items()}
        for name in (*compute_dtypes, *content.aliases.values()):
            if f"model.{name}" not in tensors:
                raise ValueError(f"compute_dtypes and aliases: expected names of tensors, found {shortened(name)}")
        left_out = {
            name: LeftOut(TensorInfo(shape, dtype_named(dtype, name)), digest)
            for name, (dtype, shape, digest) in content.left_out.items()
        }
        for name in left_out:
            if f"model.{name}" in tensors:
                raise ValueError(f"left_out: expected names that are not in tensors, found {shortened(name)}")
        if not content.topology.keys() >= _TOPOLOGY or not content.topology["world_size"]:
            found = shortened(content.topology)
            raise ValueError(f"topology: expected {', '.join(sorted(_TOPOLOGY))}, at least 1 rank; found {found}")
        _check_files(content.files, content.topology["world_size"])
        values = {**dict(content), "tensors": tensors, "compute_dtypes": compute_dtypes, "left_out": left_out}
        del values["format"]
        return cls(**values)


def _check_files(files: Sequence[FileEntry], num_ranks: int) -> None:
    """Raise ValueError unless these are the files of `num_ranks` ranks, with a checksum for each small file."""
    expected: dict[str, bool] = {}
    if len(files) == 2 * num_ranks + 1:
        expected = {DCP_METADATA: True}
        for rank in range(num_ranks):
            expected.update({data_name(rank): False, index_name(rank): True})
    found = {entry.name: entry.crc32 is not None for entry in files}
    if not expected or found != expected:
        names = shortened(sorted(found.items() - expected.items()) or sorted(expected.keys() - found.keys()))
        raise ValueError(
            f"files: expected {data_name(0)}, {index_name(0)} and so on for {num_ranks} ranks, and {DCP_METADATA}, "
            f"each with its kind of checksum; found {len(files)} files, of which these differ: {names}"
        )


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _canonical(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
