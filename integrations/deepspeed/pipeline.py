"""`PipelineEngine`: the engine that `initialize` returns for a `PipelineModule`."""

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
    """Train over the stages of a pipeline, a whole step at a time: `train_batch(data_iter)`.

    All ranks of a pipeline must get the same microbatches, even if only some stages compute with them.
    """

    _batches: Iterator[Any] | None = None
    _batch_fn: Any = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run a step on its microbatches of (inputs, labels) from the iterator, and return their mean loss, ().

        data_iter: None: the iterator that was set last, or `training_data` in its order, again and again.
        Raises RuntimeError without gradients.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch: expected gradients to be enabled, found torch.no_grad(); use eval_batch")
        self.module.train()
        if self._stepped is not None:
            self._stepped.kwargs = {}
        drawn = self._drawn(data_iter)
        self.tput_timer.start()
        result = self.lowtide.train_step(self._microbatches(drawn, self.gradient_accumulation_steps()))
        self._note_result(result)
        self._step_applied = not result.skipped
        self.micro_steps += self.gradient_accumulation_steps()
        self._count_step(self.train_batch_size(), result.skipped)
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
        """Return the mean loss, (), of `num_micro_batches` (None: those of a step), on all ranks."""
        if return_logits or not compute_loss or reduce_output != "avg":
            raise NotImplementedError(
                "eval_batch: expected a call for the mean loss, found return_logits, compute_loss=False or a "
                'reduce_output other than "avg". Outputs of the last stage stay on its rank'
            )
        count = num_micro_batches or self.gradient_accumulation_steps()
        batches = list(self._microbatches(iter(data_iter), count))  # before the first message
        if len(batches) < count:
            raise ValueError(
                f"the iterator given to eval_batch ended after {len(batches)} of {count} microbatches "
                "(num_micro_batches, else gradient_accumulation_steps)"
            )
        losses = [self.lowtide.eval_step(batch) for batch in batches]
        # As DeepSpeed's eval_batch leaves it. `train_batch` sets the mode again.
        self.module.eval()
        return torch.stack(losses).mean().to(self.device)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Make `train_batch()` draw from the loader, again and again."""
        self._batches = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Make `train_batch()` draw from the iterator."""
        self._batches = iter(iterator)

    def set_batch_fn(self, fn: Any) -> None:
        """Set a function that is applied to each drawn microbatch, and returns (inputs, labels)."""
        self._batch_fn = fn

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise NotImplementedError for another size: the schedule has a fixed number of microbatches."""
        if train_batch_size != self.train_batch_size():
            raise NotImplementedError(
                f"set_train_batch_size: expected {self.train_batch_size()}, found {train_batch_size}. The schedule of "
                "a pipeline has a fixed number of microbatches: save, and start with another config"
            )

    def is_first_stage(self) -> bool:
        return self.grid.is_first_stage()

    def is_last_stage(self) -> bool:
        return self.grid.is_last_stage()

    def get_pipeline_parallel_rank(self) -> int:
        return self.grid.stage_id

    def coalesce_grad_reduction(self) -> NoReturn:
        """Raise NotImplementedError: the schedule already runs all backwards of a step."""
        raise NotImplementedError(
            "engine.coalesce_grad_reduction(): not available over a pipeline, whose schedule runs all backwards of a "
            "step"
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
            f"{call}: not available over a pipeline. Call engine.train_batch(data_iter) or engine.eval_batch"
        )

    def _drawn(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            self._batches = iter(data_iter)
        elif self._batches is None and self.training_dataloader is not None:
            dataset = self.training_dataloader.dataset
            ranks = self.dp_world_size, self.lowtide.data_rank
            # DeepSpeed's pipeline draws the training data in order, unlike its plain engine.
            in_order: Any = torch.utils.data.DistributedSampler(dataset, *ranks, shuffle=False)
            self.set_dataloader(self.deepspeed_io(dataset, data_sampler=in_order))
        if self._batches is None:
            raise UsageError(
                "train_batch: expected an iterator of microbatches, found none. Pass one, or give training_data to "
                "initialize"
            )
        return self._batches

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
