"""Data ranks: the share of the data for a process.

Ranks that share layers or sequences (`parallel.tensor`, `parallel.sequence`) get the same batches: together they are
a single data rank. They are neighbours, so for 4 ranks, 2 of them sharing:

    rank         0  1  2  3
    data rank    0  0  1  1        of size 2; gathers keep the values of ranks 0 and 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler

from ..comm.rendezvous import num_started
from ..engine.config.errors import ConfigError
from ..engine.config.parallel import ParallelConfig, world_faults


@dataclass(frozen=True)
class DataRank:
    """A process's place among `size` data ranks. num_sharers: ranks with the same data."""

    rank: int
    size: int
    num_sharers: int
    is_first: bool  # of the ranks with the same data: collected values are this rank's

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int, num_ranks: int) -> DataRank:
        """Make the data rank of a process. Raises ConfigError if the axes do not divide the ranks."""
        if faults := world_faults(parallel, num_ranks):
            raise ConfigError(faults)
        sharers = parallel.ranks_of_sample
        return cls(rank // sharers, num_ranks // sharers, sharers, rank % sharers == 0)


class DataScheduler(AcceleratedScheduler):  # type: ignore[misc]  # accelerate has no types
    """Steps once for each data rank, as AcceleratedScheduler does for each process."""

    def __init__(self, prepared: AcceleratedScheduler, num_steps: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True)
        self._num_steps = num_steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        acts = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self._num_steps if acts else 1):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                super().step(*args, **kwargs)


def only_cpu() -> bool:
    """Return whether this host has no accelerator. On it, accelerate joins processes only if told to use the CPU."""
    return not torch.accelerator.is_available()


def refuse_alone(num_processes: int) -> None:
    """Raise ValueError if accelerate does not count the processes that the launcher started.

    Each process would then train on all batches, and write all files.
    """
    started = num_started()
    if started != num_processes:
        raise ValueError(
            f"Accelerator: expected the {started} processes of the launcher, found {num_processes} in accelerate: each "
            "would train on all batches. On a CPU pass TrainingArguments(use_cpu=True) or Accelerator(cpu=True)"
        )
