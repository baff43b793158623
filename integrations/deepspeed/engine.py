"""`DeepSpeedEngine`: lowtide's engine with the calls, counters and manners of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.step.gradient_scale import Root, hook_output, on_backward_start
from ..engine.step.model_runner import check_loss
from . import comm
from .accelerator import get_accelerator
from .config import GETTERS, DeepSpeedConfig
from .dataloader import DeepSpeedDataLoader
from .messages import UsageError, log_dist
from .monitors import MonitorMaster
from .names import listed, refused_attribute
from .optimizer_view import DeepSpeedOptimizer, OffloadsStates
from .owners import own, own_no_more
from .saving import Counters, SavingEngine
from .small import ThroughputTimer


class Boundary:
    """By their number, or as the caller says; none inside of `no_sync`.

    Where the caller alone says when a step ends (`managed_gradient_accumulation` false, `coalesced`), each backward may
    be the last, so each is reduced; the step adds them up.
    """

    def __init__(self, is_managed: bool = True) -> None:
        """is_managed: whether microbatches are counted; else each `step` updates."""
        self.is_managed = is_managed
        self.is_in_step = False
        self.is_coalescing = False
        self.said: bool | None = None  # by the caller, of each from now on; None: by their number
        self.is_in_no_sync = False

    def is_at(self, number: int, accumulation: int) -> bool:
        """Whether the microbatch of that number is one, which no_sync is not asked for. They count from 0."""
        if not self.is_managed:
            return self.is_in_step
        return (number + 1) % accumulation == 0 if self.said is None else self.said

    def may_end_at(self, number: int, accumulation: int) -> bool:
        """Whether a step may end with the backward of that microbatch."""
        if self.is_coalescing:
            return True
        return not self.is_in_no_sync and (not self.is_managed or self.is_at(number, accumulation))

    def check_managed(self, call: str) -> None:
        """Raises UsageError where the caller alone says when a step ends."""
        if not self.is_managed:
            raise UsageError(
                f"{call}: expected managed_gradient_accumulation true, found false, where each engine.step() ends a "
                "step; call step after the last microbatch"
            )

    @contextmanager
    def coalesced(self, stage: int) -> Iterator[None]:
        """See `DeepSpeedEngine.coalesce_grad_reduction`."""
        self.check_managed("engine.coalesce_grad_reduction()")
        if stage == 0:
            raise NotImplementedError(
                "engine.coalesce_grad_reduction(): expected stage 1, 2 or 3, found stage 0; use engine.no_sync()"
            )
        if self.is_in_no_sync:
            raise UsageError("engine.coalesce_grad_reduction(): expected it outside of no_sync and of itself")
        self.is_coalescing = self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_coalescing = self.is_in_no_sync = False

    @contextmanager
    def no_sync(self, stage: int) -> Iterator[None]:
        """See `DeepSpeedEngine.no_sync`."""
        if stage >= 2:
            raise UsageError(
                f"engine.no_sync(): expected stage 0 or 1, found stage {stage}, where gradients are divided over the "
                "ranks as they come; use gradient_accumulation_steps, or set_gradient_accumulation_boundary"
            )
        if self.is_in_no_sync:
            raise UsageError("engine.no_sync(): expected it once, found it inside of itself")
        self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_in_no_sync = False


DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class DeepSpeedEngine(OffloadsStates, SavingEngine):
    """What `initialize` returns first.

        loss = engine(batch); engine.backward(loss); engine.step()      for each microbatch

    A module around the caller's, whose attributes it has too. The loss is divided by the accumulation steps in
    `backward`, and `step` updates at the last microbatch of each step. `engine.lowtide` is the engine itself.
    """

    def __init__(
        self,
        engine: Engine,
        config: DeepSpeedConfig,
        basic_optimizer: torch.optim.Optimizer | None,
        training_data: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        mpu: Any,
    ) -> None:
        super().__init__()
        self.lowtide = engine
        self.module = engine.module
        self._config = config
        self._counters = Counters()
        self._boundary = Boundary(is_managed=config.managed_gradient_accumulation)
        self._num_backwards = 0  # since the last step
        self._is_in_backward = self._is_in_grad = False
        self._end_listening = on_backward_start(self._note_backward)
        self._step_applied = False
        self._grad_norm: Tensor | None = None
        self.tput_timer = ThroughputTimer(self.train_batch_size())
        self.mpu = mpu
        self.sparse_tensor_module_names: set[str] = set()  # gradients are dense on their way
        self.collate_fn = collate_fn
        self.basic_optimizer = basic_optimizer
        self.optimizer = self._optimizer()
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        own(self.module, engine)
        self._count()

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The caller's own where DeepSpeed has no wrapper around it: in fp32 at stage 0."""
        if not self.lowtide.optimizer.param_groups:
            return None
        config = self._config.checked
        is_wrapped = self._config.stage > 0 or config.fp16.enabled or config.bf16.enabled
        if self.basic_optimizer is not None and not is_wrapped:
            return self.basic_optimizer
        return DeepSpeedOptimizer(self.lowtide, self.basic_optimizer, self.zero_grad)

    # -- a step ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.module.training:
            self.tput_timer.start()
        output = self.lowtide(*inputs, **kwargs)
        if self.gradient_accumulation_steps() > 1 and torch.is_grad_enabled():
            hook_output(output, self._divided, self._kept)
        return output

    def _divided(self, gradient: Tensor) -> Tensor:
        """A gradient that comes to what the engine has returned."""
        is_whole = self._is_in_backward or self._is_in_grad
        return gradient if is_whole else gradient / self.gradient_accumulation_steps()

    def _kept(self, gradient: Tensor) -> Tensor:
        """A gradient that comes to the hidden values of tiled logits. Raises UsageError where it is to be divided."""
        if self._divided(gradient) is gradient:
            return gradient
        raise UsageError(
            "loss.backward(): expected engine.backward(loss) for a loss of tiled logits (tiles.logits) with "
            f"gradient_accumulation_steps {self.gradient_accumulation_steps()}, found a backward of the caller's own, "
            "which would not divide the gradient of the head's weight"
        )

    def _note_backward(self, roots: Sequence[Root], inputs: Sequence[Root] | None) -> Sequence[Root]:
        """See `Listener` in `engine/step/gradient_scale.py`: what `torch.autograd.grad` returns is not divided."""
        self._is_in_grad = inputs is not None
        return roots

    def _count(self) -> None:
        self.lowtide.count_by(self._is_last, self.gradient_accumulation_steps())

    def _is_last(self) -> bool:
        return self._boundary.may_end_at(self._counters.micro_steps, self.gradient_accumulation_steps())

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of the loss divided by the accumulation steps, which is what it returns.

        scale_wrt_gas: whether it is divided.
        """
        self._check_loss("backward", loss)
        self._num_backwards += 1
        accumulation = self.gradient_accumulation_steps()
        scaled = loss / accumulation if scale_wrt_gas and accumulation > 1 else loss
        self._is_in_backward = True  # in which the loss itself is divided
        try:
            if retain_graph:
                torch.autograd.backward(self.lowtide.scale(scaled), retain_graph=True)
            else:
                self.lowtide.backward(scaled)
        finally:
            self._is_in_backward = False
        return scaled

    def _backward_epilogue(self) -> None:
        """Nothing: a backward of the caller's own is as `backward`. Loops of several engines call it."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for a `backward()` of the caller's own: with float16's scale. Gradients are those of `backward`."""
        self._check_loss("scale", loss)
        return self.lowtide.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Updates after the last microbatch of a step; after others it only counts.

        With `managed_gradient_accumulation` false each call ends a step, of all backwards since the last.
        """
        if self._boundary.is_in_no_sync:
            context = "coalesce_grad_reduction" if self._boundary.is_coalescing else "no_sync"
            raise UsageError(
                f"engine.step(): expected it outside of engine.{context}(), found it inside; leave it before"
            )
        self._check_trains("step")
        self._step_applied = False
        self._boundary.is_in_step = True
        try:
            if is_boundary := self.is_gradient_accumulation_boundary():
                self._update(dict(lr_kwargs or {}))
        finally:
            self._boundary.is_in_step = False
        self._counters.micro_steps += 1
        self.tput_timer.stop(global_step=is_boundary)

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        if self._stepped is not None:
            self._stepped.kwargs = lr_kwargs
        number = self.lowtide.global_step
        result = self.lowtide.step() if self.lowtide.microbatches_done else None
        is_made = self.lowtide.global_step != number
        if result is None or not is_made:  # no backward since the last step: nothing to update with
            self._check_no_gradients()
            if self._stepped is not None:
                self._stepped.step()
        else:
            self._grad_norm = result.grad_norm
            if isinstance(self.optimizer, DeepSpeedOptimizer):
                self.optimizer.overflow = result.skipped
        was_skipped = is_made and result is not None and result.skipped
        self._step_applied = is_made and not was_skipped
        samples = self.train_batch_size()
        if not self._boundary.is_managed:
            samples = samples // self.gradient_accumulation_steps() * self._num_backwards
        self._num_backwards = 0
        self._counters.add_step(samples, was_skipped=was_skipped)
        self._report()

    def _check_no_gradients(self) -> None:
        """Raises UsageError for gradients that no backward has made: the engine would not see them."""
        found = [name for name, param in self.module.named_parameters() if param.grad is not None]
        if found:
            raise UsageError(
                f"engine.step(): expected gradients of a backward, found none, but a .grad of '{found[0]}'"
                f"{f' and {len(found) - 1} others' if len(found) > 1 else ''} that was put there by hand; call "
                "backward, then deepspeed.utils.safe_set_full_grad(param, value)"
            )

    def _report(self) -> None:
        every = self._config.checked.steps_per_print
        if every and self.global_steps % every == 0:
            text = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
            log_dist(text, ranks=[0])

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this microbatch is the last of its step."""
        return self._boundary.is_at(self._counters.micro_steps, self.gradient_accumulation_steps())

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on each microbatch is the last of its step, or none is, whatever their number."""
        self._boundary.check_managed("engine.set_gradient_accumulation_boundary()")
        self._boundary.said = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards are not the last of their step. Raises UsageError at stages 2 and 3, as there."""
        return self._boundary.no_sync(self._config.stage)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """A context for several backwards of one step, which `step` ends behind it. Each backward is reduced.

        Raises NotImplementedError at stage 0, UsageError inside of itself and of `no_sync`.
        """
        return self._boundary.coalesced(self._config.stage)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step so far. At stages 2 and 3 they stay, but after its last backward."""
        if self._config.stage < 2 or self.lowtide.is_step_complete:
            self.lowtide.zero_grad()

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged over the ranks, and not added up."""
        return bool(self._config.gradient_allreduce_op == "mean")

    def was_step_applied(self) -> bool:
        """Whether the last `step()` has updated."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping; None before the first."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing: `backward` has reduced them."""

    @cached_property
    def monitor(self) -> MonitorMaster:
        """For `write_events` of the caller: where the config's monitors write. The engine writes its own numbers."""
        return MonitorMaster(self._config.monitor_config)

    def empty_partition_cache(self) -> None:
        """Nothing: parameters are released after each use."""

    @property
    def _lender(self) -> Engine:
        return self.lowtide

    def _check_trains(self, call: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"engine.{call}(): expected an optimizer, in the config or given to deepspeed.initialize, found neither"
            )

    def _check_loss(self, call: str, loss: object) -> None:
        self._check_trains(call)
        check_loss(loss, f"engine.{call}", UsageError)

    # -- counters -------------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Steps so far, skipped ones too."""
        return self._counters.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self._counters.global_steps = value

    @property
    def global_samples(self) -> int:
        return self._counters.global_samples

    @global_samples.setter
    def global_samples(self, value: int) -> None:
        self._counters.global_samples = value

    @property
    def micro_steps(self) -> int:
        """Calls of `step` so far."""
        return self._counters.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._counters.micro_steps = value

    @property
    def skipped_steps(self) -> int:
        return self._counters.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._counters.skipped_steps = value

    # -- batch sizes ----------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return int(self._config.train_batch_size or 0)

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._config.train_micro_batch_size_per_gpu or 0)

    def gradient_accumulation_steps(self) -> int:
        return int(self._config.gradient_accumulation_steps or 1)

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """By another number of accumulation steps. Raises ValueError where the microbatches do not divide it."""
        samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size % samples:
            raise ValueError(
                f"set_train_batch_size: expected a multiple of microbatch({self.train_micro_batch_size_per_gpu()}) x "
                f"ranks({self.dp_world_size}) = {samples}, found {train_batch_size}"
            )
        self._config.train_batch_size = self.tput_timer.batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // samples
        self._count()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """The accumulation steps stay, the batch size follows."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self.tput_timer.batch_size = self.train_batch_size()

    # -- who and where --------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.lowtide.device

    @property
    def local_rank(self) -> int:
        return comm.get_local_rank()

    @property
    def global_rank(self) -> int:
        return self.lowtide.rank

    @property
    def world_size(self) -> int:
        return self.lowtide.world_size

    @property
    def dp_world_size(self) -> int:
        return self.lowtide.data_size

    @property
    def mp_world_size(self) -> int:
        return self.lowtide.config.parallel.tensor

    @property
    def config(self) -> dict[str, Any]:
        """What was given, with DeepSpeed's defaults."""
        return self._config.raw

    @property
    def lr_scheduler(self) -> Any:
        """The caller's, or that of the config."""
        return None if self._stepped is None else self._stepped._scheduler

    def get_data_parallel_rank(self) -> int:
        return self.lowtide.data_rank

    def get_lr(self) -> list[float]:
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        return [] if self.optimizer is None else [group.get("type", 0.0) for group in self.optimizer.param_groups]

    # -- data -----------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool | None = None,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's microbatches. route "eval" and "predict": in the order of the data set."""
        ranks = self.dp_world_size, self.lowtide.data_rank
        if data_sampler is None and route in ("eval", "predict"):
            data_sampler = torch.utils.data.DistributedSampler(dataset, *ranks, shuffle=False)
        on_device = get_accelerator().device_name() != "cpu"
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            on_device if pin_memory is None else pin_memory,
            self.local_rank,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=ranks[0],
            data_parallel_rank=ranks[1],
            dataloader_drop_last=self._config.dataloader_drop_last,
        )

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    # -- the rest -------------------------------------------------------------------------------------------------

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Compiles the module's forward by torch.compile."""
        options = {**(compile_kwargs or {}), **kwargs, **({} if backend is None else {"backend": backend})}
        self.module.compile(**options)

    def destroy(self) -> None:
        """Takes what the engine has put on the module off. The process group stays."""
        own_no_more(self.module, self.lowtide)
        if self.lowtide.is_open:
            self._end_listening()
        self.lowtide.close()

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS and name in listed()["runtime.engine:DeepSpeedEngine"]:
            return lambda: GETTERS[name](self._config)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__["_modules"]:
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise refused_attribute(type(self).__name__, name) from None
