"""The loader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler


class RepeatingLoader:
    """An iterator that restarts the loader at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __len__(self) -> int:
        assert isinstance(self.loader, Sized)
        return len(self.loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            # A loader that is empty ends here: the second StopIteration reaches the caller.
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """Microbatches of this data-parallel rank, in a new order after each `data_sampler.set_epoch(epoch)`.

    It is an iterable and its own iterator: `next(loader)` continues after the last loop.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Any = None,
    ) -> None:
        """num_local_io_workers: processes that read; None: read in this process."""
        self.dataset = dataset
        self.batch_size = batch_size
        is_stream = isinstance(dataset, IterableDataset)
        if data_sampler is None and not is_stream:
            data_sampler = (
                DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
                if local_rank >= 0
                else RandomSampler(dataset)  # type: ignore[arg-type]  # a dataset with a length
            )
        self.data_sampler = data_sampler
        self.dataloader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            num_workers=num_local_io_workers or 0,
            drop_last=dataloader_drop_last,
        )
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        return next(self._batches)
