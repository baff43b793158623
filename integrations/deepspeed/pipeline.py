"""`PipelineEngine`: what `initialize` returns for a `PipelineModule`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from .dataloader import RepeatingLoader
from .engine import DeepSpeedEngine
from .layers import PipelineModule
from .messages import UsageError, log_dist
from .topology import PipelineParallelGrid


class PipelineEngine(DeepSpeedEngine):
    """Trains whole batches: `train_batch(data_iter)`.

    All ranks of one pipeline are given the same microbatches, also those that do not compute with them.
    """

    _batches: Iterator[Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """(): the mean loss of a step's microbatches, (inputs, labels), drawn from the iterator.

        data_iter: None: the one that was set last, or `training_data` in its order, again and again. Raises
        RuntimeError without gradients.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch: expected gradients to be enabled, found torch.no_grad(); use eval_batch")
        self.module.train()
        if self._stepped is not None:
            self._stepped.kwargs = {}
        drawn = self._drawn(data_iter)
        self.tput_timer.start()
        result = self.lowtide.train_step(self._microbatches(drawn, self.gradient_accumulation_steps()))
        self._grad_norm = result.grad_norm
        self._step_applied = not result.skipped
        self._counters.micro_steps += self.gradient_accumulation_steps()
        self._counters.add_step(self.train_batch_size(), result.skipped)
        self.tput_timer.stop(global_step=True)
        self._report_loss(result.loss)
        return result.loss.to(self.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """(): the mean loss, on all ranks, of so many microbatches; None: those of a step."""
        if return_logits or not compute_loss or reduce_output != "avg":
            raise NotImplementedError(
                "eval_batch: expected a call for the mean loss, found return_logits, compute_loss=False or another "
                "reduce_output; what stages give stays on the rank of the last one"
            )
        count = num_micro_batches or self.gradient_accumulation_steps()
        batches = self._microbatches(self._iterator(data_iter), count)
        losses = [self.lowtide.eval_step(batch) for batch in batches]
        self.module.eval()
        return torch.stack(losses).mean().to(self.device)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """What `train_batch()` draws from, again and again."""
        self._batches = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch()` draws from."""
        self._batches = self._iterator(iterator)

    def set_batch_fn(self, fn: Any) -> None:
        """fn: from what is drawn to (inputs, labels)."""
        self._batch_fn = fn

    _batch_fn: Any = None

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raises NotImplementedError: the schedule is of a number of microbatches."""
        if train_batch_size != self.train_batch_size():
            raise NotImplementedError(
                f"set_train_batch_size: expected {self.train_batch_size()}, found {train_batch_size}; the schedule of "
                "a pipeline is made for its number of microbatches: save, and start with another config"
            )

    def is_first_stage(self) -> bool:
        return self.grid.is_first_stage()

    def is_last_stage(self) -> bool:
        return self.grid.is_last_stage()

    def get_pipeline_parallel_rank(self) -> int:
        return self.grid.get_stage_id()

    def coalesce_grad_reduction(self) -> NoReturn:
        raise NotImplementedError(
            "engine.coalesce_grad_reduction(): expected a model, found a pipeline; its schedule "
            "has all backwards of a step"
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def _is_last(self) -> bool:
        return True

    @property
    def _layers(self) -> PipelineModule:
        assert isinstance(self.module, PipelineModule)
        return self.module

    @property
    def grid(self) -> PipelineParallelGrid:
        return self._layers.mpu()

    @property
    def num_stages(self) -> int:
        return self._layers.num_pipeline_stages()

    @property
    def stage_id(self) -> int:
        return self.get_pipeline_parallel_rank()

    @property
    def micro_batches(self) -> int:
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    @property
    def data_iterator(self) -> Iterator[Any] | None:
        return self._batches

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        raise self._whole_batches("engine(batch)")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._whole_batches("engine.backward(loss)")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._whole_batches("engine.step()")

    def _whole_batches(self, call: str) -> UsageError:
        return UsageError(
            f"{call}: expected engine.train_batch(data_iter) or eval_batch over a pipeline, found this call"
        )

    def _drawn(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            self._batches = self._iterator(data_iter)
        elif self._batches is None and self.training_dataloader is not None:
            dataset = self.training_dataloader.dataset
            ranks = self.dp_world_size, self.lowtide.data_rank
            in_order: Any = torch.utils.data.DistributedSampler(dataset, *ranks, shuffle=False)
            self.set_dataloader(self.deepspeed_io(dataset, data_sampler=in_order))
        if self._batches is None:
            raise UsageError(
                "train_batch: expected an iterator of microbatches, found none; pass one, or give training_data to "
                "initialize"
            )
        return self._batches

    def _iterator(self, data: Any) -> Iterator[Any]:
        return data if isinstance(data, Iterator) else iter(data)

    def _microbatches(self, drawn: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            batch = next(drawn, None)
            if batch is None:
                return
            yield self._layers.batch_of(batch if self._batch_fn is None else self._batch_fn(batch))

    def _report_loss(self, loss: Tensor) -> None:
        every = self._config.checked.steps_per_print
        if every and self.global_steps % every == 0:
            log_dist(f"steps: {self.global_steps} loss: {float(loss):.4f} lr: {self.get_lr()}", ranks=[0])
