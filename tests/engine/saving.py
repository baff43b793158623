"""Trainings that are saved and go on elsewhere; the functions run on ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowtide
from lowtide.checkpoint.folder import CheckpointFolder
from tests.zero.training import Case, share_of

STEPS_BEFORE, STEPS_AFTER = 2, 3
GLOBAL_ROWS = 8  # the same global batches at every number of ranks


@dataclass
class Continuation:
    """What went on from a checkpoint: its losses, and what was restored, on rank 0."""

    losses: list[float]
    restored: dict[str, Tensor]


def engine_for(case: Case, world_size: int, **options: Any) -> lowtide.Engine:
    """An engine for the case with GLOBAL_ROWS rows in each global batch; the weights differ by rank count and stage."""
    torch.manual_seed(0)
    config = {**case.as_config(), "train_micro_batch_size_per_gpu": GLOBAL_ROWS // world_size // case.accumulation}
    return lowtide.initialize(case.build(), config, **options)


def train_steps(engine: lowtide.Engine, case: Case, first: int, count: int) -> list[float]:
    """The losses of steps number first, first + 1, ..."""
    return [
        engine.train_step(share_of(case.batch(step, GLOBAL_ROWS))).loss.item() for step in range(first, first + count)
    ]


def save_and_go_on(case: Case, folder: Path, world_size: int, tag: str | None = None, **options: Any) -> Continuation:
    """Trains, saves, and trains on without a break."""
    engine = engine_for(case, world_size, **options)
    train_steps(engine, case, 0, STEPS_BEFORE)
    saved = engine.save_checkpoint(folder, tag)
    losses = train_steps(engine, case, STEPS_BEFORE, STEPS_AFTER)
    engine.close()
    return Continuation(losses, saved_tensors(folder, saved) if engine.rank == 0 else {})


def load_and_go_on(case: Case, folder: Path, world_size: int, tag: str | None = None, **options: Any) -> Continuation:
    """Loads, saves at once what was restored, and trains on."""
    engine = engine_for(case, world_size, **options)
    with torch.no_grad(), engine.gathered(modify=True):
        for param in engine.module.parameters():
            param.fill_(7.0)  # nothing is right before it is loaded
    engine.load_checkpoint(folder, tag)
    assert engine.global_step == STEPS_BEFORE
    again = engine.save_checkpoint(folder / "again", f"{tag}-{engine.world_size}-{case.stage}")
    losses = train_steps(engine, case, STEPS_BEFORE, STEPS_AFTER)
    engine.close()
    return Continuation(losses, saved_tensors(folder / "again", again) if engine.rank == 0 else {})


def save_all(cases: Sequence[Case], folder: Path, world_size: int) -> list[Continuation]:
    """One call of the pool for several stages; the tags name world size and stage."""
    return [save_and_go_on(case, folder, world_size, f"{world_size}-{case.stage}") for case in cases]


def load_all(
    cases: Sequence[Case], folder: Path, world_size: int, tags: Sequence[str]
) -> dict[str, list[Continuation]]:
    """Every tag at every stage."""
    return {tag: [load_and_go_on(case, folder, world_size, tag) for case in cases] for tag in tags}


def saved_tensors(folder: Path, tag: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, read as a whole."""
    from lowtide.checkpoint.fragment import Fragment

    checkpoint = CheckpointFolder(folder).open(tag)
    found = {}
    for prefix, source in (("", checkpoint.weights), ("state.", checkpoint.states)):
        for name, info in source.tensors.items():
            values = torch.empty(info.nbytes // info.dtype.itemsize, dtype=info.dtype)
            source.read([Fragment(name, info.shape, 0, values)])
            found[prefix + name] = values.view(info.shape)
    return found
