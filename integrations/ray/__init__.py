"""lowtide in the workers of Ray Train: `lowtide.initialize` as it is, and checkpoints of all workers together.

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

from ..engine.engine import Engine


def report(
    engine: Engine,
    metrics: Mapping[str, Any],
    client_state: Mapping[str, Any] | None = None,
    *,
    saves: bool = True,
    folder: str | os.PathLike[str] | None = None,
) -> None:
    """`ray.train.report(metrics, checkpoint)` with a checkpoint of the engine, to which each worker writes its part.

    All workers must call it, between steps. client_state: as of `engine.save_checkpoint`. saves: False reports metrics
    alone. folder: where the workers write, before Ray takes the whole into its storage; every worker must see it; None:
    the storage of the run (`RunConfig(storage_path=...)`), which must be a folder then. Raises CheckpointError, and
    ValueError for a storage that is none.
    """
    from ray import train

    if not saves:
        train.report(dict(metrics))
        return
    if engine.config.checkpoint.asynchronous:
        raise ValueError(
            "checkpoint.async: expected false beside lowtide.ray.report, found true; Ray copies what is complete"
        )
    place = Path(folder) if folder is not None else _storage()
    local = place / f".lowtide-step{engine.global_step}"
    engine.save_checkpoint(local, client_state=client_state)
    checkpoint = train.Checkpoint.from_directory(local) if engine.rank == 0 else None
    train.report(dict(metrics), checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)


def restore(engine: Engine) -> dict[str, Any] | None:
    """Goes on from what the run reported last, on any number of workers; its client state, or None for a new run.

    All workers must call it, after `lowtide.initialize`. Raises CheckpointError for a checkpoint of something else.
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
            f"lowtide.ray.report: expected a storage_path that is a folder which every worker sees, found one of "
            f'"{kind}"; give report(..., folder=...) one, from which Ray uploads'
        )
    return Path(storage.experiment_fs_path)


__all__ = ["report", "restore"]
