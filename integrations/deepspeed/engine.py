"""`DeepSpeedEngine`: lowtide's engine with the calls, counters and return values of DeepSpeed's engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checkpoint.files import CheckpointError, folder_path
from ..checkpoint.folder import CheckpointFolder
from ..comm import CollectiveError
from ..engine.archive.run_state import read_client_state, read_training
from ..engine.engine import Engine
from ..engine.step.features import StepResult
from ..engine.step.gradient_scale import Root, hook_output, on_backward_start
from ..engine.step.model_runner import check_loss
from . import comm
from .accelerator import get_accelerator
from .checkpoint_files import COUNTERS
from .config import GETTERS, DeepSpeedConfig
from .dataloader import DeepSpeedDataLoader
from .lr_schedules import SteppedScheduler
from .messages import UsageError, log_dist, logger, note_frozen_are_kept
from .monitors import MonitorMaster
from .names import listed, refused_attribute
from .optimizer_view import DeepSpeedOptimizer, OffloadStateTypeEnum, offload_states
from .owners import forget_owner, set_owner
from .parameters import OffloadDeviceEnum
from .small import ThroughputTimer

_COUNTER_NAMES = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Boundary:
    """Decide which microbatch ends a step: by its number, or as the caller says. Inside `no_sync`, no microbatch does.

    If the caller alone ends a step (`managed_gradient_accumulation` false, `coalesced`), each backward may be the last.
    So each backward is reduced, and the step adds up the results.
    """

    def __init__(self, is_managed: bool = True) -> None:
        """is_managed: whether microbatches are counted. If not, each `step` updates."""
        self.is_managed = is_managed
        self.is_in_step = False
        self.is_coalescing = False
        self.forced: bool | None = None  # by set_gradient_accumulation_boundary, from now on
        self.is_in_no_sync = False

    def is_at(self, number: int, accumulation: int) -> bool:
        """Return whether microbatch `number` (from 0) ends a step. Ignores `no_sync`."""
        if not self.is_managed:
            # Only `step()` knows that a step ends, and it asks during the call.
            return self.is_in_step
        return (number + 1) % accumulation == 0 if self.forced is None else self.forced

    def may_end_at(self, number: int, accumulation: int) -> bool:
        """Return whether the backward of microbatch `number` may be the last of its step."""
        # Each backward is reduced. `is_in_no_sync` is set too, so this comes first.
        if self.is_coalescing:
            return True
        return not self.is_in_no_sync and (not self.is_managed or self.is_at(number, accumulation))

    def check_managed(self, call: str) -> None:
        """Raise UsageError if the caller alone ends a step."""
        if not self.is_managed:
            raise UsageError(
                f"{call}: expected managed_gradient_accumulation true, found false. Each engine.step() then ends a "
                "step: call it after the last microbatch only"
            )

    @contextmanager
    def coalesced(self, stage: int) -> Iterator[None]:
        """Open the context of `DeepSpeedEngine.coalesce_grad_reduction`."""
        self.check_managed("engine.coalesce_grad_reduction()")
        if stage == 0:
            raise NotImplementedError(
                "engine.coalesce_grad_reduction(): expected stage 1, 2 or 3, found stage 0. Use engine.no_sync()"
            )
        if self.is_in_no_sync:
            raise UsageError("engine.coalesce_grad_reduction(): cannot be entered inside no_sync or inside itself")
        self.is_coalescing = self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_coalescing = self.is_in_no_sync = False

    @contextmanager
    def no_sync(self, stage: int) -> Iterator[None]:
        """Open the context of `DeepSpeedEngine.no_sync`."""
        if stage >= 2:
            raise UsageError(
                f"engine.no_sync(): expected stage 0 or 1, found stage {stage}, which reduces gradients in each "
                "backward. Use gradient_accumulation_steps, or set_gradient_accumulation_boundary"
            )
        if self.is_in_no_sync:
            raise UsageError("engine.no_sync(): cannot be entered inside itself")
        self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_in_no_sync = False


DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class DeepSpeedEngine(nn.Module):
    """Train the caller's module by DeepSpeed's calls. `initialize` returns it first.

        loss = engine(batch); engine.backward(loss); engine.step()      for each microbatch

    It wraps the module and has its attributes too. `backward` divides the loss by the accumulation steps, and `step`
    updates at the last microbatch of a step. `engine.lowtide` is lowtide's engine.
    """

    module: nn.Module
    # Of the class: a loss given to one engine's `backward` is divided already, also where it reaches other engines.
    _is_in_backward = False

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
        self.global_steps = self.skipped_steps = 0  # global_steps includes the skipped
        self.global_samples = 0
        self.micro_steps = 0  # calls of `step`
        self._boundary = Boundary(is_managed=config.managed_gradient_accumulation)
        self._num_backwards = 0  # since the last step
        self._is_in_grad = False
        self._end_listening = on_backward_start(self._note_backward)
        self._step_applied = False
        self._grad_norm: Tensor | None = None
        self.tput_timer = ThroughputTimer(self.train_batch_size())
        self.mpu = mpu
        self.sparse_tensor_module_names: set[str] = set()  # gradients are always dense
        self.collate_fn = collate_fn
        self.basic_optimizer = basic_optimizer
        self.optimizer = self._optimizer()
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        set_owner(self.module, engine)
        self._set_boundaries()

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """Return a wrapper of the optimizer, or the caller's as DeepSpeed does: in fp32 at stage 0."""
        if not self.lowtide.optimizer.param_groups:
            return None
        config = self._config.checked
        is_wrapped = self._config.stage > 0 or config.fp16.enabled or config.bf16.enabled
        if self.basic_optimizer is not None and not is_wrapped:
            return self.basic_optimizer
        return DeepSpeedOptimizer(self.lowtide, self.basic_optimizer, self.zero_grad)

    # -- a step ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.module.training:
            self.tput_timer.start()
        output = self.lowtide(*inputs, **kwargs)
        # A script may call `loss.backward()` itself. Then nothing but this hook divides the gradient.
        if self.gradient_accumulation_steps() > 1 and torch.is_grad_enabled():
            hook_output(output, self._divide, self._check_undivided)
        return output

    def _divide(self, gradient: Tensor) -> Tensor:
        """Divide a gradient of the output by the accumulation steps, unless the loss is divided already."""
        is_kept = self._is_in_backward or self._is_in_grad
        return gradient if is_kept else gradient / self.gradient_accumulation_steps()

    def _check_undivided(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the hidden values of tiled logits. Raise UsageError if it needed a division."""
        if self._divide(gradient) is gradient:
            return gradient
        raise UsageError(
            "loss.backward(): expected engine.backward(loss) for a loss of tiled logits (tiles.logits) with "
            f"gradient_accumulation_steps {self.gradient_accumulation_steps()}. loss.backward() would not divide the "
            "gradient of the head's weight"
        )

    def _note_backward(self, roots: Sequence[Root], inputs: Sequence[Root] | None) -> Sequence[Root]:
        """Note whether `torch.autograd.grad` runs: its results are not divided. See `Listener` in gradient_scale.py."""
        self._is_in_grad = inputs is not None
        return roots

    def _set_boundaries(self) -> None:
        self.lowtide.count_by(self._is_last, self.gradient_accumulation_steps())

    def _is_last(self) -> bool:
        return self._boundary.may_end_at(self.micro_steps, self.gradient_accumulation_steps())

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of the loss divided by the accumulation steps, and return the divided loss.

        scale_wrt_gas: False leaves the loss undivided.
        """
        self._check_loss("backward", loss)
        self._num_backwards += 1
        accumulation = self.gradient_accumulation_steps()
        scaled = loss / accumulation if scale_wrt_gas and accumulation > 1 else loss
        DeepSpeedEngine._is_in_backward = True
        try:
            # The engine's backward frees the graph. The hooks of the engine act in torch's backward too.
            if retain_graph:
                torch.autograd.backward(self.lowtide.scale(scaled), retain_graph=True)
            else:
                self.lowtide.backward(scaled)
        finally:
            DeepSpeedEngine._is_in_backward = False
        return scaled

    def _backward_epilogue(self) -> None:
        """Do nothing: loops over several engines call it, and any backward counts as `backward` here."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times float16's scale, for your `backward()`, with the gradients of `backward`."""
        self._check_loss("scale", loss)
        return self.lowtide.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update after the last microbatch of a step. After earlier microbatches, only count.

        With `managed_gradient_accumulation` false each call ends a step of all backwards since the last call.
        """
        if self._boundary.is_in_no_sync:
            context = "coalesce_grad_reduction" if self._boundary.is_coalescing else "no_sync"
            raise UsageError(f"engine.step(): called inside engine.{context}(). Leave the context first")
        self._check_trains("step")
        self._step_applied = False
        self._boundary.is_in_step = True
        try:
            if is_boundary := self.is_gradient_accumulation_boundary():
                self._update(dict(lr_kwargs or {}))
        finally:
            self._boundary.is_in_step = False
        self.micro_steps += 1
        self.tput_timer.stop(global_step=is_boundary)

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        if self._stepped is not None:
            self._stepped.kwargs = lr_kwargs
        number = self.lowtide.global_step
        # DeepSpeed's `step` counts a step without a backward. Then the engine has nothing to update.
        has_begun = self.lowtide.microbatches_done or self.lowtide.microbatches_lost
        result = self.lowtide.step() if has_begun else None
        is_made = self.lowtide.global_step != number
        if result is None or not is_made:  # no backward since the last step, so no gradients
            self._check_no_gradients(self.lowtide.microbatches_done)
            if self._stepped is not None:
                # The engine steps the schedule with its updates. It made none, but DeepSpeed steps the schedule then.
                self._stepped.step()
        else:
            self._note_result(result)
        was_skipped = is_made and result is not None and result.skipped
        self._step_applied = is_made and not was_skipped
        samples = self.train_batch_size()
        # Without counting, the backwards since the last step are its microbatches.
        if not self._boundary.is_managed:
            samples = samples // self.gradient_accumulation_steps() * self._num_backwards
        self._num_backwards = 0
        self._count_step(samples, was_skipped)
        self._report()

    def _note_result(self, result: StepResult) -> None:
        self._grad_norm = result.grad_norm
        if isinstance(self.optimizer, DeepSpeedOptimizer):
            self.optimizer.overflow, self.optimizer._global_grad_norm = result.skipped, result.grad_norm

    def _count_step(self, num_samples: int, was_skipped: bool) -> None:
        self.global_steps += 1
        self.global_samples += num_samples
        self.skipped_steps += was_skipped

    def _check_no_gradients(self, num_earlier: int) -> None:
        """Raise UsageError for gradients of earlier microbatches, or set by hand: the engine cannot use them."""
        if num_earlier:
            raise UsageError(
                f"engine.step(): expected a backward of the last microbatch of the step, found {num_earlier} of "
                "earlier microbatches alone. Call backward for this microbatch too"
            )
        found = [name for name, param in self.module.named_parameters() if param.grad is not None]
        if found:
            raise UsageError(
                f"engine.step(): expected gradients of a backward, found none, but the .grad of '{found[0]}'"
                f"{f' and {len(found) - 1} more' if len(found) > 1 else ''} is set by hand. Call backward, then "
                "deepspeed.utils.safe_set_full_grad(param, value)"
            )

    def _report(self) -> None:
        every = self._config.checked.steps_per_print
        if every and self.global_steps % every == 0:
            text = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
            log_dist(text, ranks=[0])

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this microbatch is the last of its step."""
        return self._boundary.is_at(self.micro_steps, self.gradient_accumulation_steps())

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Make every microbatch from now on the last of its step, or none."""
        self._boundary.check_managed("engine.set_gradient_accumulation_boundary()")
        self._boundary.forced = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Open a context of backwards that do not end a step. Raises UsageError at stages 2 and 3, as in DeepSpeed."""
        return self._boundary.no_sync(self._config.stage)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Open a context for several backwards of a step, each reduced. Call `step` after it.

        Raises NotImplementedError at stage 0, UsageError inside itself or `no_sync`.
        """
        return self._boundary.coalesced(self._config.stage)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step so far. At stages 2 and 3, only after the last backward of a step.

        If an error in a backward has dropped them, the next microbatch is the first of the step at each stage.
        """
        if self.lowtide.microbatches_lost:
            self._begin_step_again()
            self.lowtide.zero_grad()
        elif self._config.stage < 2 or self.lowtide.is_step_complete:
            self.lowtide.zero_grad()

    def _begin_step_again(self) -> None:
        """Count from the step's first microbatch: the gradients so far are gone, and must be computed again."""
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._num_backwards = 0

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged over the ranks. If not, they are summed."""
        return bool(self._config.gradient_allreduce_op == "mean")

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's gradient norm before clipping: None before the first step, inf of a skipped step."""
        norm = None if self._grad_norm is None else float(self._grad_norm)
        return math.inf if norm is not None and math.isnan(norm) else norm

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: `backward` has reduced the gradients."""

    @cached_property
    def monitor(self) -> MonitorMaster:
        """The config's monitors, for the caller's `write_events`. The engine writes its numbers by itself."""
        return MonitorMaster(self._config.monitor_config)

    def empty_partition_cache(self) -> None:
        """Do nothing: parameters are released after each use."""

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states off the device until `reload_states`: see `optimizer_view.offload_states`."""
        offload_states(self.lowtide, include, device, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the offloaded states back to the device."""
        self.lowtide.reload_states()

    @property
    def _stepped(self) -> SteppedScheduler | None:
        """The scheduler, as lowtide's engine steps it."""
        found: SteppedScheduler | None = self.lowtide.lr_scheduler
        return found

    def _check_trains(self, call: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"engine.{call}(): expected an optimizer in the config or given to deepspeed.initialize, found neither"
            )

    def _check_loss(self, call: str, loss: object) -> None:
        self._check_trains(call)
        check_loss(loss, f"engine.{call}", UsageError)

    # -- batch sizes ----------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return int(self._config.train_batch_size or 0)

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._config.train_micro_batch_size_per_gpu or 0)

    def gradient_accumulation_steps(self) -> int:
        return int(self._config.gradient_accumulation_steps or 1)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the batch size by the accumulation steps. Raises ValueError if microbatches x ranks do not divide it."""
        samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size % samples:
            raise ValueError(
                f"set_train_batch_size: expected a multiple of microbatch({self.train_micro_batch_size_per_gpu()}) x "
                f"ranks({self.dp_world_size}) = {samples}, found {train_batch_size}"
            )
        self._config.train_batch_size = self.tput_timer.batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // samples
        self._set_boundaries()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the microbatch size. The accumulation steps stay, and the batch size changes."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self.tput_timer.batch_size = self.train_batch_size()

    # -- rank, device, options ------------------------------------------------------------------------------------

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
        """The given config, completed by DeepSpeed's defaults."""
        return self._config.raw

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler of the caller or of the config."""
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
        """Return a loader of this rank's microbatches. Routes "eval" and "predict" keep the order of the data set."""
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
        """Do nothing: DeepSpeed calls the function with curriculum learning alone, which is refused here."""

    # -- weights --------------------------------------------------------------------------------------------------

    def module_state_dict(
        self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return the module's state dict. At stage 3 or for a split model, rank 0 gets it, and all ranks but 0 get {}.

        All ranks must call it.
        """
        parallel = self.lowtide.config.parallel
        # Parameters are whole on each rank, so no collective is needed.
        if self._config.stage < 3 and parallel.pipeline == parallel.tensor == parallel.expert == 1:
            found = dict(self.module.state_dict(*args, **kwargs))
        else:
            found = self.lowtide.state_dict()
        if exclude_frozen_parameters:
            frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
            found = {name: value for name, value in found.items() if name not in frozen}
        return found

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load rank 0's state dict of the module. `checkpoint` may have it under "module". A begun step begins anew."""
        _refuse_custom(custom_load_fn)
        self._begin_step_again()
        values = checkpoint.get("module", checkpoint)
        self.lowtide.load_state_dict(values, strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the module's state dict by torch.save on rank 0. All ranks must call it.

        Returns False and writes nothing at stage 3 without `stage3_gather_16bit_weights_on_model_save`.
        """
        if self._config.stage == 3 and not self._config.zero_gather_16bit_weights_on_model_save:
            logger.warning("save_16bit_model: stage3_gather_16bit_weights_on_model_save is false, nothing is written")
            return False
        values = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        failed: Exception | None = None
        if self.lowtide.rank == 0:
            try:
                folder = folder_path(save_dir)
                folder.mkdir(parents=True, exist_ok=True)
                torch.save({name: value.detach().cpu() for name, value in values.items()}, folder / save_filename)
            except Exception as error:  # torch.save raises various errors
                failed = error
        # All ranks wait here: a rank may read the file right after the call.
        if self.lowtide.agree(failed is not None):
            raise failed or RuntimeError("save_16bit_model failed on rank 0, whose error says why")
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        found = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return found if self.lowtide.rank == 0 else None

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the training into save_dir/tag in lowtide's format, and return True. All ranks must call it.

        tag: default "global_stepN". client_state: plain values that `load_checkpoint` returns. The key
        checkpoint.exclude_frozen_parameters of the config says whether frozen parameters are left out. Gradients
        between the microbatches of a step are not saved: after a load, the step begins anew.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint: expected a folder, found {save_dir!r}")
        if exclude_frozen_parameters and not self.lowtide.config.checkpoint.exclude_frozen_parameters:
            note_frozen_are_kept("save_checkpoint")
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._check_tag(name)
        counters = {name: getattr(self, name) for name in _COUNTER_NAMES}
        # The gradients of a begun step are not saved, so after a load it begins anew.
        counters["micro_steps"] -= self.micro_steps % self.gradient_accumulation_steps()
        state = {**(client_state or {}), COUNTERS: counters}
        self.lowtide.save_checkpoint(save_dir, name, state, latest=save_latest, within_step=True)
        return True

    def _check_tag(self, name: str) -> None:
        """Warn or raise UsageError, by `checkpoint.tag_validation`, if ranks have different tags."""
        if self._config.tag_validation == "IGNORE" or self.lowtide.world_size == 1:
            return
        names: list[Any] = [None] * self.lowtide.world_size
        try:
            comm.all_gather_object(names, name)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.lowtide.rank} in save_checkpoint: not all ranks came ({str(error).splitlines()[0]}). "
                "Every rank must call engine.save_checkpoint(), not one alone."
            ) from error
        if len(set(names)) > 1:
            text = f"save_checkpoint: expected one tag on all ranks, found {', '.join(sorted(set(names)))}"
            if self._config.tag_validation == "FAIL":
                raise UsageError(text)
            logger.warning("%s. Rank 0's tag is used", text)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint in lowtide's format, and return (its path, its client state).

        tag: default the latest. Without a tag and without a checkpoint it returns (None, None). Checkpoints of
        DeepSpeed need `lowtide checkpoint import` first. load_module_only: load weights alone.
        """
        _refuse_custom(custom_load_fn)
        folder = CheckpointFolder(folder_path(load_dir))
        try:
            checkpoint = folder.open(None if tag is None else str(tag))
        except CheckpointError as error:
            if tag is not None or folder.latest() is not None:
                raise
            logger.warning("load_checkpoint: %s", error)
            return None, None
        path, stepped = checkpoint.path, self._stepped
        self._begin_step_again()
        if load_module_only or not load_optimizer_states:
            self.lowtide.load_weights(path, load_module_strict)
            client_state = read_client_state(checkpoint.own_state(0))
            # `load_weights` does not read the schedule, so it comes from the manifest.
            schedule = read_training(checkpoint.manifest.training)["learning_rates"]["scheduler"]
            if not load_module_only and load_lr_scheduler_states and stepped is not None and schedule is not None:
                stepped.load_state_dict(schedule)
        else:
            with nullcontext() if load_lr_scheduler_states or stepped is None else stepped.hidden():
                client_state = self.lowtide.load_checkpoint(path.parent, path.name)
        if not load_module_only:
            self._load_counters(client_state.get(COUNTERS))
        return str(path), {key: value for key, value in client_state.items() if key != COUNTERS}

    def _load_counters(self, saved: Any) -> None:
        """Set the counters. saved: None for a checkpoint of a plain lowtide engine: its steps give them."""
        if not isinstance(saved, Mapping):
            steps = self.lowtide.global_step
            samples, microbatches = steps * self.train_batch_size(), steps * self.gradient_accumulation_steps()
            saved = dict(zip(_COUNTER_NAMES, (steps, samples, microbatches, 0), strict=True))
        for name in _COUNTER_NAMES:
            setattr(self, name, saved[name])
        self._begin_step_again()  # the saved microbatches may have been counted in steps of another number

    # -- compile, end, attributes ---------------------------------------------------------------------------------

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile the module's forward by torch.compile."""
        options = {**(compile_kwargs or {}), **kwargs, **({} if backend is None else {"backend": backend})}
        self.module.compile(**options)

    def destroy(self) -> None:
        """Remove everything that the engine put on the module. The process group stays."""
        forget_owner(self.module, self.lowtide)
        if self.lowtide.is_open:
            self._end_listening()
        self.lowtide.close()

    def train(self, mode: bool = True) -> Self:
        """Set the module's mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS and name in listed()["runtime.engine:DeepSpeedEngine"]:
            return lambda: GETTERS[name](self._config)
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Without a module, asking for it would come back here without end.
            if name == "module" or "module" not in self.__dict__["_modules"]:
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise refused_attribute(type(self).__name__, name) from None


def _refuse_custom(custom_load_fn: Callable[..., Any] | None) -> None:
    if custom_load_fn is not None:
        raise NotImplementedError(
            "custom_load_fn: expected none. No rank alone can load sharded parameters: change the state "
            "dict first, and pass it to engine.lowtide.load_state_dict"
        )
