"""Trainings that are saved and go on elsewhere; the functions run on ranks."""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowtide
from lowtide.checkpoint.folder import CheckpointFolder
from tests.checkpoint.making import read_all
from tests.kit.training import Case, differences

STEPS_BEFORE, STEPS_AFTER = 2, 2
GLOBAL_ROWS = 8  # of a microbatch: the same global batches at every number of ranks


@dataclass
class Continuation:
    """What went on from a checkpoint: a value for each step, and what was restored, on rank 0."""

    losses: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    restored: dict[str, Tensor] = field(default_factory=dict)

    def differences(self, other: "Continuation") -> list[str]:
        """What is not the same to the last bit; empty where all is."""
        found = [name for name in ("losses", "lrs", "scales") if getattr(self, name) != getattr(other, name)]
        return found + self.state_differences(other)

    def state_differences(self, other: "Continuation") -> list[str]:
        """The tensors that were not restored to the last bit."""
        return differences(self.restored, other.restored)


@dataclass(frozen=True)
class Trip:
    """A training that is saved as one case and goes on as another. options: of lowtide.initialize."""

    saved: Case
    loaded: Case
    options: Mapping[str, Any] = field(default_factory=dict)
    steps_before: int = STEPS_BEFORE


def engine_for(case: Case, world_size: int, **options: Any) -> lowtide.Engine:
    """An engine for the case with GLOBAL_ROWS rows in each global microbatch."""
    torch.manual_seed(0)
    config = case.as_config()
    data_size = world_size // config.get("parallel", {}).get("pipeline", 1)
    config["train_micro_batch_size_per_gpu"] = GLOBAL_ROWS // data_size
    return lowtide.initialize(case.build(), config, **options)


def run_steps(engine: lowtide.Engine, case: Case, first: int, count: int) -> Continuation:
    """Takes steps number first, first + 1, ..."""
    found = Continuation()
    for step in range(first, first + count):
        batch = case.batch(step, GLOBAL_ROWS * case.accumulation)
        result = engine.train_step(tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch))
        found.losses.append(result.loss.item())
        found.lrs.append(result.lr)
        found.scales.append(result.loss_scale)
    return found


def save_and_go_on(
    case: Case,
    folder: Path,
    world_size: int,
    tag: str | None = None,
    steps: int = STEPS_BEFORE,
    after: int = STEPS_AFTER,
    **options: Any,
) -> Continuation:
    """Trains, saves, and trains on without a break."""
    engine = engine_for(case, world_size, **options)
    run_steps(engine, case, 0, steps)
    saved = engine.save_checkpoint(folder, tag)
    found = run_steps(engine, case, steps, after)
    engine.close()
    found.restored = saved_tensors(folder, saved) if engine.rank == 0 else {}
    return found


def load_and_go_on(
    case: Case,
    folder: Path,
    world_size: int,
    tag: str | None = None,
    steps: int = STEPS_BEFORE,
    after: int = STEPS_AFTER,
    **options: Any,
) -> Continuation:
    """Loads, saves at once what was restored, and trains on."""
    engine = engine_for(case, world_size, **options)
    spoil(engine)
    engine.load_checkpoint(folder, tag)
    assert engine.global_step == steps
    again = engine.save_checkpoint(folder / "again", f"{tag}-{engine.world_size}-{case.stage}")
    found = run_steps(engine, case, steps, after)
    engine.close()
    found.restored = saved_tensors(folder / "again", again) if engine.rank == 0 else {}
    return found


def spoil(engine: lowtide.Engine) -> None:
    """Nothing is right before it is loaded."""
    with torch.no_grad(), engine.gathered(modify=True):
        for value in (*engine.module.parameters(), *engine.module.buffers()):
            value.fill_(7.0)


def save_all(cases: Sequence[Case], folder: Path, world_size: int) -> list[Continuation]:
    """One call of the pool for several stages; the tags name world size and stage."""
    return [save_and_go_on(case, folder, world_size, f"{world_size}-{case.stage}") for case in cases]


def load_all(cases: Sequence[tuple[str, Case]], folder: Path, world_size: int) -> list[Continuation]:
    """cases: which goes on from which tag."""
    return [load_and_go_on(case, folder, world_size, tag) for tag, case in cases]


def save_trips(trips: Sequence[Trip], folder: Path, world_size: int) -> list[Continuation]:
    """The tags are the numbers of the trips."""
    return [
        save_and_go_on(trip.saved, folder, world_size, f"trip{number}", trip.steps_before, **trip.options)
        for number, trip in enumerate(trips)
    ]


def load_trips(trips: Sequence[Trip], folder: Path, world_size: int) -> list[Continuation]:
    return [
        load_and_go_on(trip.loaded, folder, world_size, f"trip{number}", trip.steps_before, **trip.options)
        for number, trip in enumerate(trips)
    ]


def no_space(*args: object) -> int:
    """In the place of a call that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saved_tensors(folder: Path, tag: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint; states have a prefix."""
    checkpoint = CheckpointFolder(folder).open(tag)
    states = {f"state.{name}": value for name, value in read_all(checkpoint.states).items()}
    return {**read_all(checkpoint.weights), **states}
