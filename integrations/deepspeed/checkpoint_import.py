"""Convert DeepSpeed checkpoints to lowtide's: weights, states, step counts, scheduler and client state."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.checkpoint import MODEL, STATE
from ..checkpoint.chunk_view import ChunkView, TensorInfo
from ..checkpoint.dcp import STEP, OptimizerNames, option_blobs
from ..checkpoint.export import export_source
from ..checkpoint.files import CheckpointError, folder_path
from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.index import Manifest
from ..checkpoint.values import encode
from ..checkpoint.writer import write_part
from ..engine.archive.run_state import encode_client_state, random_state
from ..engine.config.config import Config
from ..optimizers import OPTIMIZERS
from .checkpoint_files import COUNTERS, DeepSpeedCheckpoint, load_pickle, read_deepspeed


def import_deepspeed(
    source: str | os.PathLike[str], target: str | os.PathLike[str], tag: str | None = None
) -> tuple[Path, list[str]]:
    """Convert a DeepSpeed checkpoint into the folder `target`. It loads at any number of ranks and any stage.

    Returns (path, notes on parts that could not be converted). tag: None: the latest. Needs host memory for the whole
    checkpoint. Raises NoCheckpointError, CheckpointError and OSError.
    """
    found = read_deepspeed(folder_path(source), tag)
    folder = CheckpointFolder(folder_path(target))
    if os.path.lexists(folder.path / found.tag):  # DeepSpeed's checkpoint, or that of a training with lowtide
        raise CheckpointError(
            f"{folder.path}: expected a folder without '{found.tag}', which the import would replace. Name a new folder"
        )
    notes: list[str] = []
    own_state = {
        "random": random_state(torch.device("cpu")),
        "client_state": encode_client_state(_plain(found.client_state, notes) | {COUNTERS: found.counters}),
    }
    if not found.groups:
        notes.append("no optimizer states: load only the weights (engine.load_weights, load_module_only=True)")
    kind = _kind(found)
    is_ours = kind in OPTIMIZERS
    # A class of torch that is not ours keeps its step beside the states of each group.
    step = {"step": torch.tensor(float(found.num_updates))}
    steps = {} if is_ours else dict.fromkeys(range(len(found.groups)), step)
    own_state["scalars"] = encode(steps, "optimizer state")
    has_step = bool(found.states) and (not is_ours or OPTIMIZERS[kind].keeps_step)
    names = OptimizerNames(tuple(found.states) if has_step else (), tuple(map(tuple, found.group_names)))
    tensors = _tensors(found)
    chunk_views = [ChunkView(name, tuple(value.shape), 0, value.view(-1)) for name, value in tensors.items()]
    saving = folder.begin(found.tag)
    try:
        blobs = option_blobs(kind, found.groups, names) if found.groups else []
        write_part(saving, 0, chunk_views, blobs, own_state)
        folder.commit(_manifest(found, tensors, kind, notes), names, keep_last=None)
    # Also for an interrupt: a part of a checkpoint must not stay as a checkpoint.
    except BaseException:
        folder.discard(found.tag)
        raise
    return folder.path / found.tag, notes


def is_folder_of_weights(path: Path) -> bool:
    """Return whether a folder has the torch.save files of DeepSpeed's `zero_to_fp32`."""
    return any(path.glob("pytorch_model*.bin"))


def import_weights(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Convert this folder to safetensors, for `engine.load_weights`. Raises CheckpointError."""
    values: dict[str, torch.Tensor] = {}
    for file in sorted(folder_path(source).glob("pytorch_model*.bin")):
        values |= {name: value for name, value in load_pickle(file).items() if isinstance(value, torch.Tensor)}
    export_source(_InMemory(values), target)
    return folder_path(target)


def _info(value: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(value.shape), value.dtype)


class _InMemory:
    """Tensors in memory as a `TensorSource`."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self.tensors = {name: _info(value) for name, value in values.items()}
        self.bytes_read = 0

    def read(self, chunk_views: Sequence[ChunkView]) -> None:
        for chunk_view in chunk_views:
            chunk_view.values.copy_(self._values[chunk_view.name].reshape(-1)[chunk_view.start : chunk_view.end])


def _tensors(found: DeepSpeedCheckpoint) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint by their names in ours."""
    tensors = {MODEL + name: value.contiguous() for name, value in found.weights.items()}
    for name, states in found.states.items():
        tensors |= {f"{STATE}{name}.{state}": value.contiguous() for state, value in states.items()}
    return tensors | {STEP: torch.tensor(float(found.num_updates), dtype=torch.float32)}


def _manifest(found: DeepSpeedCheckpoint, tensors: Mapping[str, torch.Tensor], kind: str, notes: list[str]) -> Manifest:
    return Manifest(
        tag=found.tag,
        step=found.counters["global_steps"],
        saved_at=0.0,
        has_own_tag=True,
        versions={"lowtide": version("lowtide"), "torch": torch.__version__, "python": platform.python_version()},
        # As if a single rank at stage 0 had saved it: a checkpoint loads at any number of ranks.
        topology={"world_size": 1, "stage": 0, "shard_size": 1, "replicas": 1, "pipeline": 1},
        tensors={name: _info(value) for name, value in tensors.items()},
        compute_dtypes=found.compute_dtypes,
        aliases=found.aliases,
        training=encode(_training(found, kind, notes), "training"),
        config=Config.load({}).as_dict(),
    )


def _training(found: DeepSpeedCheckpoint, kind: str, notes: list[str]) -> dict[str, Any]:
    scheduler = None if found.scheduler is None else _plain({"": found.scheduler}, notes).get("")
    base_lr = (found.optimizer.get("params") or {}).get("lr")
    return {
        "global_step": found.counters["global_steps"],
        "num_steps": found.num_updates if found.groups else 0,
        "optimizer": kind,
        "learning_rates": {
            "options": [_plain(group, notes) for group in found.groups],
            "members": [list(names) for names in found.group_names],
            "base": [float(group.get("initial_lr", base_lr or group["lr"])) for group in found.groups],
            "scheduler": scheduler,
        },
        "loss_scaler": found.loss_scaler,
        "averages": None,
    }


_KINDS = {"exp_inf": "Adamax", "exp_avg": "lion", "sum": "adagrad", "acc_delta": "Adadelta", "square_avg": "RMSprop"}
"""State -> optimizer, if the config names none: ours, or the class of torch of the caller's object."""


def _kind(found: DeepSpeedCheckpoint) -> str:
    """Return lowtide's name of the optimizer: by the checkpoint's config, else by its states and options."""
    written = str(found.optimizer.get("type") or "").lower()
    named = next((row.name for row in OPTIMIZERS.values() if written in (row.name, *row.deepspeed_names)), None)
    if named is not None:
        options = found.optimizer.get("params") or {}
        return "adamw" if named == "adam" and options.get("adam_w_mode", True) is True else named
    states = {state for by_name in found.states.values() for state in by_name}
    if "exp_avg_sq" in states:
        decoupled = all(group.get("decoupled_weight_decay", True) for group in found.groups)
        return "adamw" if decoupled else "adam"
    # Without a second moment: the first of these states decides. Without any, it is SGD.
    return next((kind for state, kind in _KINDS.items() if state in states), "sgd")


def _plain(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the values that lowtide's checkpoints can hold, and add a note for each value left out."""
    kept = {}
    for key, value in values.items():
        try:
            encode(value, key)
        except ValueError as error:
            notes.append(f"left out: {error}")
        else:
            kept[key] = value
    return kept
