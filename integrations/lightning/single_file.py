"""A Trainer's checkpoint folder as what Lightning reads: a dictionary, or one ordinary file."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.fragment import Fragment
from ..checkpoint.safetensors_files import SafetensorsSource
from .checkpoints import TRAINER_FILE, read_trainer_file, trainer_state


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Writes what `LightningModule.load_from_checkpoint` reads: weights under the module's own names, hyperparameters.

    folder: that a Trainer with LowtideStrategy has saved, on any number of ranks. No engine is needed, and memory for
    the whole model. Raises NoCheckpointError and CheckpointError.
    """
    torch.save(read_whole(folder), file)


def read_whole(folder: str | os.PathLike[str], weights_only: bool | None = False) -> dict[str, Any]:
    """What such a file has, without states of an optimizer. weights_only: of torch.load, for the Trainer's part."""
    path = Path(folder)
    if (path / TRAINER_FILE).is_file():  # of save_weights_only
        source = SafetensorsSource(path)
        return {**read_trainer_file(path, weights_only), "state_dict": _values(source), "optimizer_states": []}
    checkpoint = CheckpointFolder(path).open()
    dumped = trainer_state(path, weights_only)
    values = _values(checkpoint.weights)
    values.update({alias: values[name] for alias, name in checkpoint.aliases.items()})
    return {**dumped, "state_dict": values, "optimizer_states": []}


def _values(source: Any) -> dict[str, Tensor]:
    values = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Fragment(name, tuple(value.shape), 0, value.view(-1)) for name, value in values.items()])
    return values


def read_folders_in(saving: Any) -> None:
    """saving: Lightning's module whose function reads the file of `load_from_checkpoint`; folders of ours too then."""
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
