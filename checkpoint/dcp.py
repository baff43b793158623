"""The metadata of torch.distributed.checkpoint for our checkpoint files.

With it FSDP2, `dcp_to_torch_save` and all other readers of that format load our checkpoints. They look for

    model.NAME                    a parameter or buffer; tied parameters under each of their names
    optim.state.NAME.STATE        an optimizer state; STATE may be "step", a number shared by all parameters
    ema.NAME                      a moving average of a parameter
    optim.param_groups.0.lr       an option of a parameter group; "params" are the names of its parameters
    optim.param_groups.NAME.lr    the same option in a flattened optimizer state dict

Their format is a pickle, and this module never reads it. torch.distributed.checkpoint takes 45 MiB of a process, and
only rank 0 needs it, so it is imported when the file is written.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..optimizers import OPTIMIZERS
from .chunk_view import TensorInfo
from .files import data_name
from .index import Row, RowsByName

PARAM_GROUPS = "optim.param_groups."
"""Prefix of options of parameter groups, which are not tensors."""
_STATE = "optim.state."
STEP = "optim.step"
"""The tensor behind each `optim.state.NAME.step`, except for parameters that have a tensor `optim.step.NAME`."""


@dataclass(frozen=True)
class OptimizerNames:
    """Names of the parameters that have a step, and of the parameters of each group."""

    stepped: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


def option_blobs(kind: str, groups: Sequence[Mapping[str, Any]], names: OptimizerNames) -> list[tuple[str, bytes]]:
    """Serialize every option of each parameter group as (name, bytes).

    kind: an optimizer such as "adamw", or a class name. Options of torch's optimizer that ours lacks get torch's
    defaults.
    """
    blobs = []
    for index, (group, params) in enumerate(zip(groups, names.groups, strict=True)):
        for key, value in {**_torch_options(kind), **group, "params": list(params)}.items():
            buffer = io.BytesIO()
            # A reader of that format calls `torch.load` on each blob.
            torch.save(value, buffer)
            blobs.append((f"{PARAM_GROUPS}{index}.{key}", buffer.getvalue()))
    return blobs


def metadata_bytes(
    tensors: Mapping[str, TensorInfo],
    aliases: Mapping[str, str],
    optimizer: OptimizerNames,
    rows: RowsByName,
) -> bytes:
    """Build the content of `.metadata`.

    tensors: by full name, as listed above. aliases: further full name -> full name. rows: of all ranks, by name.
    """
    from torch.distributed.checkpoint import metadata as types
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    found: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    storage: dict[types.MetadataIndex, _StorageInfo] = {}

    def storage_of(rank: int, row: Row) -> _StorageInfo:
        return _StorageInfo(data_name(rank), row.offset, row.nbytes)

    def add_tensor(name: str, info: TensorInfo, source: str) -> None:
        chunks = []
        for rank, row in rows.get(source, ()):
            chunks.append(types.ChunkStorageMetadata(torch.Size(row.chunk.offsets), torch.Size(row.chunk.sizes)))
            storage[types.MetadataIndex(name, row.chunk.offsets)] = storage_of(rank, row)
        found[name] = types.TensorStorageMetadata(types.TensorProperties(info.dtype), torch.Size(info.shape), chunks)
        paths[name] = _path_of(name)

    def add_option(name: str) -> None:
        number, option = name.removeprefix(PARAM_GROUPS).split(".", 1)
        members = optimizer.groups[int(number)] if option != "params" else ()
        for rank, row in rows[name]:
            for key in (name, *(f"{PARAM_GROUPS}{param}.{option}" for param in members)):
                storage[types.MetadataIndex(key)] = storage_of(rank, row)
                found[key] = types.BytesStorageMetadata()
                # Both names of an option have the same path, so a reader of everything finds it once.
                paths[key] = ("optim", "param_groups", int(number), option)

    for name, info in tensors.items():
        # The number of steps is stored once, and listed below for each parameter.
        if name != STEP and not name.startswith(f"{STEP}."):
            add_tensor(name, info, source=name)
    for alias, name in aliases.items():
        add_tensor(alias, tensors[name], source=name)
    for name in optimizer.stepped:
        own = f"{STEP}.{name}"
        add_tensor(f"{_STATE}{name}.step", tensors[STEP], source=own if own in tensors else STEP)
    for name in rows:
        if name.startswith(PARAM_GROUPS):
            add_option(name)
    return pickle.dumps(types.Metadata(found, paths, storage))


def _path_of(name: str) -> tuple[str, ...]:
    """Return the keys in the nested state dict: "optim.state.a.b.exp_avg" -> optim, state, a.b, exp_avg."""
    if name.startswith(_STATE):
        return ("optim", "state", *name.removeprefix(_STATE).rsplit(".", 1))
    return tuple(name.split(".", 1))


def _torch_options(kind: str) -> dict[str, Any]:
    """Read the defaults of torch's optimizer from its signature, since an instance would import torch's compiler."""
    record = OPTIMIZERS.get(kind)
    twin = None if record is None else record.torch_twin
    if record is None or twin is None:
        return {}
    # The first parameter of a torch optimizer is `params`, no option.
    parameters = list(inspect.signature(twin).parameters.values())[1:]
    return {**{parameter.name: parameter.default for parameter in parameters}, **record.torch_options}
