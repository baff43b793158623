"""The metadata of torch.distributed.checkpoint for files that are written here.

With it FSDP2, `dcp_to_torch_save` and every other reader of that format load a checkpoint of ours. They look for

    model.NAME                    a parameter or buffer, tied parameters under each of their names
    optim.state.NAME.STATE        an optimizer state; STATE may be "step", one number for all of them
    optim.param_groups            the options, as torch.distributed.checkpoint.state_dict gives them

The file is a pickle, which is their format; nothing here ever reads it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .fragment import TensorInfo
from .index import RankIndex, Row, data_name

PARAM_GROUPS = "optim.param_groups"
_STATE = "optim.state."
STEP = "optim.step"
"""The tensor to which all `optim.state.NAME.step` refer."""


def param_groups_blob(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """groups: the options of each, with the names of its parameters as "params"."""
    buffer = io.BytesIO()
    torch.save([dict(group) for group in groups], buffer)
    return buffer.getvalue()


def metadata_bytes(
    tensors: Mapping[str, TensorInfo], aliases: Mapping[str, str], stepped: Sequence[str], ranks: Sequence[RankIndex]
) -> bytes:
    """The content of `.metadata`.

    tensors: by full name, as above. aliases: further full name -> full name. stepped: the parameters that have a step.
    """
    rows: dict[str, list[tuple[int, Row]]] = {}
    for rank, index in enumerate(ranks):
        for row in index.rows:
            rows.setdefault(row.name, []).append((rank, row))
    built = _Builder(rows)
    for name, info in tensors.items():
        if name != STEP:
            built.add_tensor(name, info, source=name)
    for alias, name in aliases.items():
        built.add_tensor(alias, tensors[name], source=name)
    for name in stepped:
        built.add_tensor(f"{_STATE}{name}.step", tensors[STEP], source=STEP)
    built.add_bytes(PARAM_GROUPS)
    return pickle.dumps(Metadata(built.metadata, built.paths, built.storage))


class _Builder:
    """Collects the three tables of the metadata. rows: by name, with the rank in whose file they are."""

    def __init__(self, rows: Mapping[str, Sequence[tuple[int, Row]]]) -> None:
        self._rows = rows
        self.metadata: dict[str, Any] = {}
        self.paths: dict[str, tuple[str, ...]] = {}
        self.storage: dict[MetadataIndex, _StorageInfo] = {}

    def add_tensor(self, name: str, info: TensorInfo, source: str) -> None:
        chunks = []
        for rank, row in self._rows.get(source, ()):
            chunks.append(ChunkStorageMetadata(torch.Size(row.box.offsets), torch.Size(row.box.sizes)))
            self.storage[MetadataIndex(name, row.box.offsets)] = _storage_of(rank, row)
        self.metadata[name] = TensorStorageMetadata(TensorProperties(info.dtype), torch.Size(info.shape), chunks)
        self.paths[name] = _path_of(name)

    def add_bytes(self, name: str) -> None:
        for rank, row in self._rows.get(name, ()):
            self.storage[MetadataIndex(name)] = _storage_of(rank, row)
            self.metadata[name] = BytesStorageMetadata()
            self.paths[name] = _path_of(name)


def _storage_of(rank: int, row: Row) -> _StorageInfo:
    return _StorageInfo(data_name(rank), row.place.offset, row.place.nbytes)


def _path_of(name: str) -> tuple[str, ...]:
    """The keys under which the nested state dict has it: "optim.state.a.b.exp_avg" -> optim, state, a.b, exp_avg."""
    if name.startswith(_STATE):
        return ("optim", "state", *name.removeprefix(_STATE).rsplit(".", 1))
    return tuple(name.split(".", 1))
