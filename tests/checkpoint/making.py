"""Checkpoints written by hand, without an engine and without ranks; and all that a source of tensors has."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.checkpoint.chunk_view import ChunkView, TensorInfo, TensorSource
from lowtide.checkpoint.dcp import STEP, OptimizerNames
from lowtide.checkpoint.files import MANIFEST
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.checkpoint.index import Manifest
from lowtide.checkpoint.writer import write_part

NO_OPTIMIZER = OptimizerNames((), ())
Pieces = Sequence[Mapping[str, tuple[int, int]]]
"""For each rank: name -> the range of the flattened tensor that it writes."""


def manifest_of(tensors: Mapping[str, Tensor], tag: str, world_size: int, **changes: Any) -> Manifest:
    infos = {f"model.{name}": TensorInfo(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    values: dict[str, Any] = {
        "tag": tag,
        "step": 1,
        "saved_at": 0.0,
        "has_own_tag": False,
        "versions": {},
        "topology": {"world_size": world_size, "stage": 0, "shard_size": 1, "replicas": world_size},
        "tensors": {**infos, STEP: TensorInfo((), torch.float32)},
        "compute_dtypes": {},
        "aliases": {},
        "training": None,
        "config": {},
    }
    return Manifest(**{**values, **changes})


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    tag: str = "a",
    pieces: Pieces | None = None,
    world_size: int = 2,
    keep_last: int | None = None,
    is_latest: bool = True,
    **changes: Any,
) -> CheckpointFolder:
    """A complete checkpoint of the tensors, of which each rank has an even range; `latest` names it if `is_latest`."""
    target = CheckpointFolder(folder)
    sizes = {name: value.numel() for name, value in tensors.items()}
    pieces = pieces or [
        {name: (size * rank // world_size, size * (rank + 1) // world_size) for name, size in sizes.items()}
        for rank in range(world_size)
    ]
    saving = target.begin(tag)
    for rank, ranges in enumerate(pieces):
        chunk_views = [
            ChunkView(f"model.{name}", tuple(tensors[name].shape), start, tensors[name].reshape(-1)[start:end])
            for name, (start, end) in ranges.items()
        ]
        if rank == 0:
            chunk_views.append(ChunkView(STEP, (), 0, torch.ones(1)))
        write_part(saving, rank, chunk_views, [], {"rank": rank})
    target.commit(manifest_of(tensors, tag, len(pieces), **changes), NO_OPTIMIZER, keep_last, is_latest)
    return target


def read_all(source: TensorSource) -> dict[str, Tensor]:
    found = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([ChunkView(name, tuple(values.shape), 0, values.view(-1)) for name, values in found.items()])
    return found


def read_by_library(folder: Path) -> dict[str, Tensor]:
    """All that the safetensors files of a folder have, by the library of that name."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def put(*path: Any) -> Callable[[Any], None]:
    """Puts the last into the place in plain values that the others lead to."""
    *keys, last, value = path

    def change(content: Any) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def resign(folder: Path, change: Callable[[Any], None], name: str = MANIFEST) -> None:
    """Changes what a file of a checkpoint says, and all checksums and sizes that would tell."""
    outer = json.loads((folder / MANIFEST).read_text())
    content = outer["content"]
    if name == MANIFEST:
        change(content)
    else:
        inner = json.loads((folder / name).read_text())
        change(inner)
        text = json.dumps(inner).encode()
        (folder / name).write_bytes(text)
        (entry,) = [entry for entry in content["files"] if entry["name"] == name]
        entry.update(nbytes=len(text), crc32=zlib.crc32(text))
    outer["crc32"] = zlib.crc32(json.dumps(content, separators=(",", ":")).encode())
    (folder / MANIFEST).write_text(json.dumps(outer))
