"""What a checkpoint holds of the counters of DeepSpeed's engine, beside the caller's own state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.files import folder_path
from ..checkpoint.folder import CheckpointFolder
from ..engine.archive.run_state import read_client_state, read_training
from .checkpoint_files import COUNTERS


@dataclass
class Counters:
    """Of an engine, saved with each checkpoint."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0

    def add_step(self, num_samples: int, was_skipped: bool) -> None:
        """A step has ended."""
        self.global_steps += 1
        self.global_samples += num_samples
        self.skipped_steps += was_skipped

    def at_step_start(self, accumulation: int) -> Counters:
        """As they were before the microbatches that are done of the next step."""
        return replace(self, micro_steps=self.micro_steps - self.micro_steps % accumulation)

    def as_state(self) -> dict[str, Any]:
        """A part of the client state."""
        return {COUNTERS: asdict(self)}

    @classmethod
    def taken(
        cls, client_state: Mapping[str, Any], global_step: int, accumulation: int, batch_size: int
    ) -> tuple[Counters, dict[str, Any]]:
        """Those of a checkpoint, and the caller's own part; of one that has none, by its number of steps."""
        own = {key: value for key, value in client_state.items() if key != COUNTERS}
        found = client_state.get(COUNTERS)
        if isinstance(found, Mapping):
            return cls(**found), own
        return cls(global_step, global_step * batch_size, global_step * accumulation), own


@dataclass(frozen=True)
class Saved:
    """Beside tensors."""

    client_state: dict[str, Any]
    scheduler: dict[str, Any] | None


def path_of(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, Callable[[], Saved]]:
    """Where a checkpoint is, and what reads it. Raises NoCheckpointError, CheckpointError."""
    found = CheckpointFolder(folder_path(folder)).open(tag)
    return found.path, lambda: _read(found)


def _read(checkpoint: Checkpoint) -> Saved:
    training = read_training(checkpoint.manifest.training)
    return Saved(read_client_state(checkpoint.own_state(0)), training["learning_rates"]["scheduler"])
