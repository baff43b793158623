"""Checkpoints of a Trainer: a folder with the engine's checkpoint, with the Trainer's state as client state.

epoch=3-step=400.ckpt/
    latest, checkpoint/...                       the whole training; loads at any number of ranks
weights.ckpt/                                    of ModelCheckpoint(save_weights_only=True):
    model.safetensors, ..., trainer.ckpt         plain weights, and the Trainer's state

`consolidate` and `read_whole` convert this folder to Lightning's form: a file, or a dictionary.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.chunk_view import whole_values
from ..checkpoint.files import CheckpointError
from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.safetensors_files import SafetensorsSource
from ..checkpoint.values import decode
from ..engine.engine import Engine
from ..watch.log import logger

TAG = "checkpoint"
TRAINER_FILE = "trainer.ckpt"
_KEY = "lightning"
_TIED = "lowtide_tied"  # in the trainer file: further names of tied parameters -> the name in the safetensors
_IN_ENGINE = ("state_dict", "optimizer_states")  # empty in the Trainer's dump
_FULL = "lr_schedulers"  # in the Trainer's dump, unless it wants only weights


def save(engine: Engine, folder: str | os.PathLike[str], dumped: Mapping[str, Any], is_first: bool) -> None:
    """Save a checkpoint. A collective. dumped: the Trainer's dictionary. is_first: this is rank 0."""
    kept = {key: value for key, value in dumped.items() if key not in _IN_ENGINE}
    # As bytes: the Trainer's state may hold any objects, and the engine's client state takes plain values alone.
    if _FULL in dumped:
        file = io.BytesIO()
        torch.save(kept, file)
        # As with DDP: a validation or an interrupt between the microbatches of a step may save too.
        engine.save_checkpoint(folder, TAG, {_KEY: file.getvalue()}, within_step=True)
        return
    # `save_weights_only`: a folder that any tool can read.
    engine.export(folder)
    if is_first:
        names: dict[int, str] = {}
        values = engine.module.state_dict(keep_vars=True)
        # Extra states of modules are any objects, also the same None, and are not in the export.
        tied = {name: names.setdefault(id(one), name) for name, one in values.items() if isinstance(one, torch.Tensor)}
        kept[_TIED] = {name: first for name, first in tied.items() if name != first}
        torch.save(kept, Path(folder) / TRAINER_FILE)


def load(
    engine: Engine, path: str | os.PathLike[str], weights_only: bool | None, is_fit: bool, strict: bool
) -> dict[str, Any]:
    """Load weights, and for a fit states, into the engine; return the Trainer's dictionary. A collective.

    Raises CheckpointError, NoCheckpointError, and ValueError for values of another model.
    """
    path = Path(path)
    if path.is_file():
        return _load_file(engine, path, weights_only, is_fit, strict)
    if (path / TRAINER_FILE).is_file():
        engine.load_weights(path, strict)
        if is_fit:
            _note(engine, f"{path} has only weights, so the optimizer begins anew")
        return dict(_read(path / TRAINER_FILE, weights_only), state_dict={})
    state = trainer_state(path, weights_only)
    if is_fit:
        engine.load_checkpoint(path)
    else:
        engine.load_weights(path, strict)
    return {**state, "state_dict": {}}


def trainer_state(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the Trainer's dictionary of a checkpoint. Raises CheckpointError without it."""
    own = CheckpointFolder(path).open().own_state(0)
    client_state = decode(own["client_state"], "client_state")
    if _KEY not in client_state:
        raise CheckpointError(
            f"{path}: expected a checkpoint of Lightning's Trainer, found a checkpoint of an engine alone. Load it by "
            "`trainer.strategy.engine.load_checkpoint(...)` in a hook of the fit"
        )
    return _read(io.BytesIO(client_state[_KEY]), weights_only)


def _load_file(engine: Engine, path: Path, weights_only: bool | None, is_fit: bool, strict: bool) -> dict[str, Any]:
    """Load an ordinary checkpoint file of Lightning."""
    dumped = _read(path, weights_only)
    engine.load_state_dict(dumped["state_dict"], strict)
    if is_fit and dumped.get("optimizer_states"):
        _note(engine, f"{path} is a file of Lightning: its optimizer states cannot be loaded, and begin anew")
    return dumped


def _read(file: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read as Lightning does: local files are trusted, unless weights_only is True."""
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=bool(weights_only))
    return found


def _note(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        logger.warning("%s", text)


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the file for `LightningModule.load_from_checkpoint`: weights by the module's names, hyperparameters.

    folder: saved by a Trainer with LowtideStrategy on any number of ranks. Needs no engine, but memory for the whole
    model. Raises NoCheckpointError and CheckpointError.
    """
    torch.save(read_whole(folder), file)


def read_whole(folder: str | os.PathLike[str], weights_only: bool | None = False) -> dict[str, Any]:
    """Return the content of this file, without optimizer states. weights_only: of torch.load, for Trainer state."""
    path = Path(folder)
    if (path / TRAINER_FILE).is_file():  # saved with save_weights_only
        dumped, values = _read(path / TRAINER_FILE, weights_only), whole_values(SafetensorsSource(path))
        tied = dumped.pop(_TIED, {})
    else:
        checkpoint = CheckpointFolder(path).open()
        dumped, values = trainer_state(path, weights_only), whole_values(checkpoint.weights)
        tied = checkpoint.manifest.aliases
    values.update({alias: values[name] for alias, name in tied.items()})
    return {**dumped, "state_dict": values, "optimizer_states": []}


def read_folders_in(saving: Any) -> None:
    """Patch Lightning's `load_from_checkpoint` to read our folders too. saving: the module with its `pl_load`."""
    load = saving.pl_load

    @wraps(load)
    def read(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path_or_url, (str, os.PathLike)) or not Path(path_or_url).is_dir():
            return load(path_or_url, map_location=map_location, weights_only=weights_only)
        dumped = read_whole(path_or_url, weights_only)
        if isinstance(map_location, (str, torch.device)):
            dumped["state_dict"] = {name: value.to(map_location) for name, value in dumped["state_dict"].items()}
        return dumped

    saving.pl_load = read
