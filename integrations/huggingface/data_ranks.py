"""Whose share of the data a process takes, and the calls of an Accelerator that divide data or collect it.

Ranks that share layers or sequences (`parallel.tensor`, `parallel.sequence`) are given the same batches: together they
are one rank of the data. They are next to each other, so of 4 ranks, 2 of them sharing:

    rank         0  1  2  3
    data rank    0  0  1  1        of size 2; what is collected is that of ranks 0 and 2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor

from ..comm.rendezvous import num_started
from ..engine.config.errors import ConfigError
from ..engine.config.parallel import ParallelConfig, world_faults

_Base: Any = object  # what the mixin stands before


@dataclass(frozen=True)
class DataRank:
    """rank: of `size`, by which data are divided. num_sharers: ranks that take the same data."""

    rank: int
    size: int
    num_sharers: int
    is_first: bool
    """Of those that take the same data: this rank's values count where all are collected."""

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int, num_ranks: int) -> DataRank:
        """Raises ConfigError where the axes do not divide the ranks."""
        if faults := world_faults(parallel, num_ranks):
            raise ConfigError(faults)
        sharers = parallel.ranks_of_sample
        return cls(rank // sharers, num_ranks // sharers, sharers, rank % sharers == 0)


class DataCalls(_Base):  # type: ignore[misc]  # mypy knows nothing of that class
    """Before accelerate.Accelerator in the bases of a class: data are divided over `data_rank`, and collected so."""

    data_rank: DataRank

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As accelerate's, over data-parallel ranks. Raises ValueError for `dispatch_batches` where others share."""
        data = self.data_rank
        if data.num_sharers == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise ValueError(
                f"Accelerator: expected no dispatch_batches where {data.num_sharers} ranks are given the same batches, "
                "found it: rank 0 would give each of them another part; leave it out"
            )
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=data.size,
            process_index=data.rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if self.data_rank.num_sharers == 1 or type(prepared) is not AcceleratedScheduler or prepared.split_batches:
            return prepared
        self._schedulers.remove(prepared)
        prepared = _DataScheduler(prepared, self.data_rank.size)
        self._schedulers.append(prepared)
        return prepared

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        data = self.data_rank
        state: Any = accelerate.PartialState
        view = SimpleNamespace(num_processes=data.size, process_index=data.rank, device=self.device)
        with state.split_between_processes(view, inputs, apply_padding) as part:
            yield part

    def gather(self, tensor: Any) -> Any:
        """As accelerate's, of data-parallel ranks: of those that take the same data, the first one's."""
        gathered = super().gather(tensor)
        return gathered if self.data_rank.num_sharers == 1 else recursively_apply(self._of_first, gathered)

    def _of_first(self, gathered: Tensor) -> Tensor:
        data = self.data_rank
        return torch.cat(gathered.chunk(data.size * data.num_sharers)[:: data.num_sharers])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object:
            try:
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
        if use_gather_object and not self.data_rank.is_first:
            input_data = []  # objects of all ranks are put into one list
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As accelerate's, of data-parallel ranks."""
        if reduction == "sum" and not self.data_rank.is_first:
            tensor = recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)


class _DataScheduler(AcceleratedScheduler):  # type: ignore[misc]  # accelerate has no types
    """Acts for each data-parallel rank, as AcceleratedScheduler does for each process."""

    def __init__(self, prepared: AcceleratedScheduler, num_steps: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True)
        self._num_steps = num_steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        acts = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self._num_steps if acts else 1):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                super().step(*args, **kwargs)


def only_cpu() -> bool:
    """Whether this host has no accelerator; accelerate joins processes there only where it is told to use the CPU."""
    return not torch.accelerator.is_available()


def refuse_alone(num_processes: int) -> None:
    """Raises ValueError where accelerate counts other processes than an engine will.

    The loop of each would take all batches then, and write the files of all.
    """
    started = num_started()
    if started != num_processes:
        raise ValueError(
            f"Accelerator: expected the {started} processes that the launcher has started, found {num_processes} in "
            "accelerate: each would train on all batches; on a CPU say so, by TrainingArguments(use_cpu=True) or "
            "Accelerator(cpu=True)"
        )
