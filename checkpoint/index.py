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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from ..offload import TensorChunk
from .chunk_view import NamedDtype, TensorInfo, name_of
from .files import (
    DCP_METADATA,
    CheckpointError,
    Count,
    Flag,
    Text,
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

_Checksum = Annotated[int, Field(strict=True, ge=0, lt=1 << 64)]
_TOPOLOGY = frozenset({"world_size", "stage", "shard_size", "replicas"})
LAST_MOMENT = 1 << 37  # seconds since 1970: the limit of `datetime`
_Seconds = Annotated[float, Field(strict=True, ge=0, lt=LAST_MOMENT)]


class FileContent(BaseModel):
    """An object of a file. Its types are checked. Unknown keys, from later versions, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def parse(cls, content: Any) -> Any:
        """Return the checked content. Raises ValueError with the place of the first fault."""
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


class Row(NamedTuple):
    """A chunk of a tensor, and the place of its archive and of its values in the file of the rank that wrote it."""

    name: Text
    offsets: tuple[Count, ...]  # of the chunk in the tensor
    sizes: tuple[Count, ...]
    offset: Count  # of the archive, in bytes from the start of the file
    nbytes: Count  # of the archive
    values_offset: Count  # from the start of the file
    values_checksum: _Checksum

    @property
    def chunk(self) -> TensorChunk:
        return TensorChunk(self.offsets, self.sizes)


class RankIndex(FileContent):
    """The content of a rank's file, and state of this rank alone, such as its random state."""

    file_nbytes: Count
    rows: tuple[Row, ...]
    own_state: Any  # encoded by `values`

    def write(self, path: Path) -> None:
        write_durably(path, _canonical(dict(self)))

    @classmethod
    def from_json(cls, text: bytes) -> RankIndex:
        """Parse an index. Raises ValueError if it is not consistent in itself."""
        found: RankIndex = cls.parse(_parsed(text))
        check_depth(found.own_state, "own_state")
        return found


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
class LeftOut(TensorInfo):
    """A frozen parameter that is stored elsewhere. digest: of its values, 16 hex digits."""

    digest: Text


def _from_list(value: object) -> object:
    """Name the fields of a `TensorInfo` or `LeftOut`, which is a list in files."""
    # Not strict: a TensorInfo has two values, a LeftOut three. Fields check what is missing.
    return dict(zip(("dtype", "shape", "digest"), value, strict=False)) if isinstance(value, list) else value


_Info = Annotated[
    TensorInfo, BeforeValidator(_from_list), PlainSerializer(lambda info: [name_of(info.dtype), info.shape])
]
_LeftOut = Annotated[
    LeftOut, BeforeValidator(_from_list), PlainSerializer(lambda one: [name_of(one.dtype), one.shape, one.digest])
]


class FileEntry(FileContent):
    """A file of the checkpoint. crc32: of the whole file, or None if its rows have checksums."""

    name: Text
    nbytes: Count
    crc32: Count | None


class Manifest(FileContent):
    """The description of a checkpoint. Tensors are named "model.NAME", "optim.state.NAME.STATE" and "ema.NAME"."""

    tag: Text
    step: Count
    saved_at: _Seconds  # seconds since 1970, later than the checkpoint before it
    has_own_tag: Flag  # the caller chose the tag: the checkpoint is never deleted to make room
    versions: dict[str, Text]
    topology: dict[str, Count]  # world_size, stage, shard_size, replicas
    tensors: dict[str, _Info]
    compute_dtypes: dict[str, NamedDtype]  # of the parameters, by model names
    aliases: dict[str, Text]  # further names of tied parameters -> the first name, which has the values
    training: Any  # state of the engine besides tensors, encoded by `values`
    config: dict[str, Any]
    model_files: dict[str, Any] = {}  # name -> JSON content, written beside an export
    files: tuple[FileEntry, ...] = ()
    left_out: dict[str, _LeftOut] = {}  # frozen parameters stored elsewhere, by model names
    format: Count = FORMAT

    @property
    def num_files(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return self.topology["world_size"]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)

    def write(self, path: Path) -> None:
        """Write the description. Raises OSError, or ValueError for content that could not be read again."""
        text = _canonical({**self.model_dump(mode="json"), "format": FORMAT})
        # A checkpoint that `read` would refuse must fail now, while the run still has its state.
        self._checked(json.loads(text))
        write_durably(path, b'{"crc32": %d, "content": %s}\n' % (zlib.crc32(text), text))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a description. Raises CheckpointError for a missing or damaged file, a later format, or bad content."""
        try:
            text = read_regular(path)
        except FileNotFoundError:
            is_other = any(path.parent.glob("*mp_rank_*_model_states.pt"))
            instead = "files of DeepSpeed: convert them by `lowtide checkpoint import`" if is_other else "no such file"
            raise CheckpointError(f"{path}: expected the description of a checkpoint, found {instead}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: expected the description of a checkpoint: {error.strerror}") from error
        try:
            outer = _parsed(text)
            content = outer["content"]
            # JSON written again has the same bytes: Python keeps the order of keys and all digits of a float.
            is_intact = zlib.crc32(_canonical(content)) == outer["crc32"]
            found = content["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_intact = False
        if not is_intact:
            raise CheckpointError(f"{path}: expected the file as written, found it truncated or altered")
        # Before the content is checked: a later format may have other fields.
        if isinstance(found, int) and found > FORMAT:
            raise CheckpointError(
                f"{path}: expected a format of at most {FORMAT}, found a format of a later version. Update lowtide."
            )
        try:
            return cls._checked(content)
        except ValueError as error:
            raise CheckpointError(f"{path}: expected the description of a checkpoint; {error}") from None

    @classmethod
    def _checked(cls, content: Any) -> Manifest:
        """Return the description, checked as a whole. Raises ValueError with the place of the fault."""
        found: Manifest = cls.parse(content)
        check_tag(found.tag)
        for name in found.model_files:
            check_model_file(name)
        check_depth([found.training, found.config, found.model_files], "training, config or model_files")
        for name in (*found.compute_dtypes, *found.aliases.values()):
            if f"model.{name}" not in found.tensors:
                raise ValueError(f"compute_dtypes and aliases: expected names of tensors, found {shortened(name)}")
        for name in found.left_out:
            if f"model.{name}" in found.tensors:
                raise ValueError(f"left_out: expected names that are not in tensors, found {shortened(name)}")
        if not found.topology.keys() >= _TOPOLOGY or not found.num_files:
            topology = shortened(found.topology)
            raise ValueError(f"topology: expected {', '.join(sorted(_TOPOLOGY))}, at least 1 rank; found {topology}")
        _check_files(found.files, found.num_files)
        return found


def _check_files(files: Sequence[FileEntry], num_ranks: int) -> None:
    """Raise ValueError unless these are the files of `num_ranks` ranks, with a checksum for each small file."""
    # `num_ranks` is a number from the file: it is compared before a loop runs that often.
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
            f"each with its kind of checksum; found {len(files)} files; these differ: {names}"
        )


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _canonical(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
