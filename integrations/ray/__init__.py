"""Checkpoints of all workers together for Ray Train. `lowtide.initialize` works in it as everywhere.

def train(config):
    engine = lowtide.initialize(model, config["engine"])  # joins the process group of TorchTrainer
    restore(engine)
    while engine.global_step < config["steps"]:
        result = engine.train_step(batch)
        report(engine, {"loss": result.loss.item()})
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.files import folder_path
from ..engine.engine import Engine


def report(
    engine: Engine,
    metrics: Mapping[str, Any],
    client_state: Mapping[str, Any] | None = None,
    *,
    saves: bool = True,
    folder: str | os.PathLike[str] | None = None,
) -> None:
    """Call `ray.train.report(metrics, checkpoint)` with a checkpoint of the engine, written by all workers together.

    All workers must call it, between steps. client_state: as in `engine.save_checkpoint`. saves: False reports only
    metrics. folder: the workers write it before Ray uploads it; every worker must see it; None: the run's storage
    (`RunConfig(storage_path=...)`), then a folder. Raises CheckpointError, and ValueError for a storage
    that is no folder.
    """
    from ray import train

    if not saves:
        train.report(dict(metrics))
        return
    if engine.config.checkpoint.asynchronous:
        raise ValueError(
            "checkpoint.async: expected false with lowtide.ray.report, found true. Ray copies only complete checkpoints"
        )
    place = folder_path(folder) if folder is not None else _storage()
    # With the step in its name, a report never writes into a folder that Ray still uploads.
    local = place / f".lowtide-step{engine.global_step}"
    engine.save_checkpoint(local, client_state=client_state)
    checkpoint = train.Checkpoint.from_directory(local) if engine.rank == 0 else None
    # Only rank 0 gives the folder: it has the shards of all ranks, and Ray would upload a copy for each worker.
    train.report(dict(metrics), checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)


def restore(engine: Engine) -> dict[str, Any] | None:
    """Load the run's last reported checkpoint, on any number of workers, and return its client state. None: new run.

    All workers must call it, after `lowtide.initialize`. Raises CheckpointError for a checkpoint of another kind.
    """
    from ray import train

    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return engine.load_checkpoint(folder)


def _storage() -> Path:
    from ray import train

    storage = train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        raise ValueError(
            f'lowtide.ray.report: expected a storage_path that is a folder every worker sees, found "{kind}". Pass '
            "such a folder by report(..., folder=...): Ray uploads from it"
        )
    return Path(storage.experiment_fs_path)


__all__ = ["report", "restore"]
