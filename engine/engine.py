"""The engine: a model, its sharded optimizer, and the steps of training."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checkpoint.errors import CheckpointError
from ..comm import Activity
from ..offload import OffloadError
from ..watch.log import logger
from ..zero.gradient import GroupGradient
from ..zero.sequence import UnitSequence
from .archive import weights
from .archive.checkpoint import Checkpointer
from .archive.named_state import NamedState
from .batch import call, call_for_loss, forward, loss_of, microbatches, prepared
from .full_values import FullValues
from .gradient_scale import GradientScale
from .guard import ModelGuard
from .learning_rates import LearningRates
from .memory import ModelStateBytes, measure
from .parts import Parts
from .pipeline import Pipeline
from .preemption import Preemption
from .reporting import reported
from .step_log import StepLog
from .step_result import StepResult
from .step_sums import non_finite_error, sum_step
from .step_update import StepUpdate, Timing
from .turn import Turn, in_turn


class Engine:
    """Trains one model as its config says.

        train_step(batch) = [forward, backward] x gradient_accumulation_steps, then step

    backward: unit by unit, gradients are reduced as they come (`zero.sequence`); at the accumulation boundary they
    are final. step: the exact global norm, clip factor, update of the shards, and new parameters for the next forward.
    Made by `lowtide.initialize`.
    """

    def __init__(self, parts: Parts) -> None:
        self.config = parts.config
        self.module = parts.module
        self.optimizer = parts.optimizer
        self._learning_rates = LearningRates(parts.optimizer, parts.schedule, parts.lr_scheduler)
        self.global_step = 0
        self.client_state: dict[str, Any] = {}
        """Saved with every checkpoint and restored with it: numbers, strings, ..., or what has a `state_dict()` and a
        `load_state_dict()`, such as a loader that knows its place in the data."""
        self._turn = Turn()
        self._parts = parts
        self._mesh = parts.mesh
        self._progress = parts.mesh.world.progress
        self._sequence = parts.sequence
        self._scaler = parts.loss_scaler
        self._accumulation = parts.config.gradient_accumulation_steps or 1
        own = (param for unit in parts.sequence.units for group in unit.groups for param in group.params)
        self._gradient_scale = GradientScale(parts.config, self.data_size, parts.loss_scaler, own)
        self._num_microbatches = 0
        self._losses: list[Tensor] = []
        shares = any(group.copies_are_shared for unit in parts.sequence.units for group in unit.groups)
        has_settled = self._timing is not Timing.DELAYED
        self._guard = ModelGuard(parts.module, parts.sequence.units, shares, has_settled)
        self._pipeline = parts.pipeline
        whole = parts.pipeline.plan.state_names if parts.pipeline else None
        self._values = FullValues(parts.module, parts.sequence.units, parts.optimizer, parts.mesh, whole)
        self._log = StepLog(parts.config.steps_per_print if self.rank == 0 else 0)
        self._last = StepResult(torch.zeros(()), torch.zeros(()), self.lr, self._scaler.scale, False)
        self._saving: AbstractContextManager[object] = parts.activation_offload or nullcontext()
        self._named = NamedState(
            parts.module,
            parts.sequence.units,
            parts.optimizer,
            parts.mesh,
            parts.pipeline.plan.trained if parts.pipeline else None,
            whole,
        )
        self._checkpointer = Checkpointer(parts.config, parts.mesh, parts.module, parts.optimizer, self._named)
        self._preemption = Preemption()
        if parts.config.checkpoint.on_sigterm:
            self._preemption.arm(says_so=self.rank == 0)
        delay_after_steps = parts.config.zero_optimization.offload_optimizer.delay_after_steps
        self._update = StepUpdate(
            parts.optimizer,
            parts.sequence,
            parts.mesh,
            self._timing,
            lambda: self._gradient_scale.rest,
            delay_after_steps,
        )
        self._progress.stop_clock(Activity.BEFORE_FIRST_STEP)

    # -- who and where --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._mesh.world.rank

    @property
    def world_size(self) -> int:
        return self._mesh.world.size

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks: by which data are divided. Without a pipeline, that is the world size."""
        return self._mesh.data_size

    @property
    def data_rank(self) -> int:
        """Whose share of the data this rank takes; ranks of one pipeline take the same."""
        return self._mesh.data_rank

    @property
    def device(self) -> torch.device:
        return self._mesh.world.device

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.optimizer.lr

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that was passed to `initialize`; None where the config has one."""
        return self._learning_rates.scheduler

    def memory(self) -> ModelStateBytes:
        """Bytes of parameters, gradients and optimizer states on this rank, as they are now."""
        return measure(self._sequence.units, self.optimizer)

    # -- training -------------------------------------------------------------------------------------------------

    @in_turn
    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's share of a global batch, or on an iterator of microbatches.

        Raises NonFiniteGradientError where a gradient is not finite (float16: the step is skipped instead). After an
        error of all ranks alike the next call is a step of its own: no gradient of the failed one is left.
        """
        try:
            parts = self._progress.drawn(microbatches(batch, self._accumulation, self._parts.rows_per_microbatch))
            if self._pipeline is not None:
                self._run_pipeline(self._pipeline, list(parts))
                return self._step()
            for microbatch in parts:
                ready = self._prepare(microbatch)
                self._guard.check()
                with self._saving:
                    output = call_for_loss(self.module, ready, self._parts.loss_fn)
                    self._gradient_scale.leave(output)
                    loss = loss_of(output, ready, self._parts.loss_fn)
                self._backward(loss)
        except BaseException:
            self._forget_gradients()
            raise
        return self._step()

    @in_turn
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with inputs on the device and in the compute dtype."""
        self._check_has_whole("engine(batch)", "engine.eval_step(batch)")
        self._guard.check()
        with self._saving, self._progress.forward(self._num_microbatches, torch.is_grad_enabled()):
            output = forward(self.module, self._prepare(args), self._prepare(kwargs))
            self._gradient_scale.leave(output)
            return output

    @in_turn
    def backward(self, loss: Tensor) -> None:
        """Computes gradients of the mean loss over microbatches and ranks, and reduces them as the ZeRO stage says.

        Inputs and leaves that are not the engine's parameters get the gradient of `loss` itself.
        An error in it ends the step: its gradients are forgotten, and the next microbatch is the first of a new one.
        """
        self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        self._check_has_whole("engine.backward(loss)", "engine.train_step(batch)")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"backward: expected a loss with one element that requires a gradient, found {_describe(loss)}; "
                "was it computed under torch.no_grad(), or detached?"
            )
        self._progress.enter(Activity.BACKWARD, self._num_microbatches)
        boundary = self._num_microbatches % self._accumulation == self._accumulation - 1
        self._update.begin_backward(boundary)
        if boundary:
            self._guard.expect_update()
        assert isinstance(self._sequence, UnitSequence)
        self._sequence.begin_backward(boundary)
        try:
            self._gradient_scale.backward(loss)
            self._sequence.end_backward()
        except BaseException as error:
            self._sequence.abort(error)
            self._forget_gradients()
            raise
        self._losses.append(loss.detach())
        self._num_microbatches += 1

    @in_turn
    def step(self) -> StepResult:
        """Updates the parameters at the accumulation boundary; before it, only returns the last result."""
        return self._step()

    def _step(self) -> StepResult:
        if self._num_microbatches % self._accumulation or not self._num_microbatches:
            return self._last
        self._progress.enter(Activity.UPDATE)
        self._guard.expect_update()
        stop = self._preemption
        events = (self._checkpointer.has_failed, self._update.has_failed(), stop.is_requested, stop.is_interrupt)
        sums = sum_step(self._mesh, self._gradients, self._losses, events, f"the norm of step {self.global_step}")
        save_failed, update_failed, *stops = sums.events
        if update_failed:
            self._forget_gradients()
            self._update.raise_failure()
        scale, lr, factor = self._scaler.scale, self.lr, self._gradient_scale.rest
        grad_norm = math.sqrt(sums.square_norm) * factor if not sums.num_bad else math.nan
        skipped = bool(sums.num_bad)
        clip = self.config.gradient_clipping
        needs_clipping = bool(clip) and grad_norm > clip
        if skipped or needs_clipping:
            self._update.take_back()
            self._mesh.fence(f"the end of what was tried in step {self.global_step}")
        if skipped and not self._is_fp16:
            try:
                self._raise_non_finite()
            finally:
                self._forget_gradients()
        if not skipped:
            if needs_clipping:
                factor *= clip / (grad_norm + 1e-6)
            self._update.finish(factor, f"the update of step {self.global_step}")
            self._learning_rates.advance()
        else:
            self._update.settle()
        self._guard.remember_values()
        if self._guard.shares_values:  # else a rank that is ahead may change what this one remembers
            self._mesh.fence(f"the end of step {self.global_step}")
        self._forget_gradients()
        self._scaler.update(skipped)
        self.global_step += 1
        self._last = StepResult(
            torch.tensor(sums.loss, dtype=sums.loss_dtype),
            torch.tensor(grad_norm, dtype=sums.loss_dtype),
            lr,
            scale,
            skipped,
        )
        self._progress.end_step(self.global_step)
        self._log.after_step(self.global_step, self._last, self.config.train_batch_size or 0)
        self._save_if_due(bool(save_failed), *stops)
        return self._last

    @in_turn
    @torch.no_grad()
    @reported(Activity.EVALUATION)
    def eval_step(self, batch: Any) -> Tensor:
        """The loss of a batch of any size, averaged over the ranks, without gradients and in eval mode."""
        was_training = self.module.training
        self.module.eval()
        try:
            ready = self._prepare(batch)
            if self._pipeline is not None:
                losses = self._pipeline.evaluate(batch, ready)
            else:
                losses = [loss_of(call(self.module, ready), ready, self._parts.loss_fn)]
        finally:
            self.module.train(was_training)
        sums = sum_step(self._mesh, (), losses, (), "the mean of the loss")
        return torch.tensor(sums.loss, dtype=sums.loss_dtype)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # -- full values ----------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *params: nn.Parameter, modify: bool = False) -> Iterator[None]:
        """A context in which the given parameters (none: all) are full. All ranks must enter it.

        modify: they may also be changed, on every rank alike; the changes reach shards and master weights at the end.
        Without it a change raises ValueError on every rank at the end.
        """
        if modify:
            with self._turn.of("engine.gathered(modify=True)"):  # what is changed is in the engine when this has ended
                self._update.settle()
                with self._progress.during(Activity.WEIGHTS), self._values.modified(params):
                    yield
                self._guard.remember()
            return
        self._turn.check("engine.gathered()")
        self._update.take_back()  # what is not a step yet
        with self._progress.during(Activity.WEIGHTS), self._values.gathered(params, self._guard.num_changes):
            yield

    @in_turn
    @reported(Activity.WEIGHTS)
    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers under the model's own names, on the CPU, on rank 0; empty on other ranks.

        All ranks must call it. Gathered and copied unit by unit.
        """
        self._update.settle()
        return self._values.state_dict()

    @in_turn
    @reported(Activity.WEIGHTS)
    def export(
        self,
        folder: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        shard_bytes: int | str = 5_000_000_000,
    ) -> None:
        """Writes parameters and persistent buffers as safetensors in the model's own names; `from_pretrained` reads it.

        dtype: "fp32", "bf16", "fp16", "fp64", a torch dtype, or None: as each parameter is computed. shard_bytes: of
        one file, also "500MB". All ranks must call it; each writes its own shards, nothing is gathered. Raises
        CheckpointError on every rank where one could not write; an earlier export is as it was then.
        """
        self._update.settle()
        weights.export(self.module, self._named, self._mesh.world, folder, dtype, shard_bytes)

    @in_turn
    @reported(Activity.WEIGHTS)
    def load_weights(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Takes over the tensors of safetensors files, or of a checkpoint; each rank reads only what its shards hold.

        All ranks must call it. Raises ValueError, with all that is missing, extra or misshaped, before anything is
        changed; without `strict` missing and extra ones are logged. CheckpointError where a file cannot be read.
        """
        self._forget_gradients()
        self._update.settle()
        weights.load_weights(self._named, self._mesh.world, path, strict)
        self._guard.remember()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @in_turn
    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> str:
        """Saves all that the training is into folder/tag, and makes `latest` name it; returns the tag.

        tag: "global_step100" and so on where none is given; rank 0's counts. client_state: saved beside
        `engine.client_state`. Call it on all ranks, between steps. With `checkpoint.async` it returns when the values
        are copied; a failure is raised at the next step, save or close.

        Raises CheckpointError on every rank if any fails (what was saved before is intact), and ValueError between the
        microbatches of a step.
        """
        return self._save_checkpoint(folder, tag, client_state)

    @reported(Activity.SAVING)
    def _save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> str:
        if self._num_microbatches:
            raise ValueError(
                f"save_checkpoint: expected a whole step, found {self._num_microbatches} of "
                f"{self._accumulation} microbatches done (gradient_accumulation_steps); gradients are not saved, "
                "so call it after engine.step() has acted"
            )
        self._update.settle()
        state = {**self.client_state, **(client_state or {})}
        return self._checkpointer.save(folder, tag, state, self.global_step, self._training_state())

    @in_turn
    @reported(Activity.LOADING)
    def load_checkpoint(self, folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
        """Goes on where a checkpoint was saved, whatever its number of ranks and ZeRO stage; returns its client state.

        tag: None for the latest. What stands in `engine.client_state` is restored in place. Options of the optimizer
        are the saved ones, except those that the config now says otherwise. With another number of ranks the random
        generators go on as they are, and the client state is that of rank 0.

        Raises NoCheckpointError where there is none; CheckpointError where a file is missing, truncated or altered, or
        the checkpoint is of another model.
        """
        self._forget_gradients()
        try:
            self._update.settle()
        except OffloadError as error:  # what it has left is overwritten
            logger.warning("%s", error)
        restored = self._checkpointer.load(folder, tag, self.client_state, self.lr_scheduler)
        self._update.forget_failure()
        self._restore_training_state(restored.training, restored.config)
        for key, value in restored.client_state.items():
            if key in self.client_state and not hasattr(self.client_state[key], "load_state_dict"):
                self.client_state[key] = value
        return restored.client_state

    def close(self) -> None:
        """Takes the hooks off and leaves the process group, where an engine made it. No call is possible then.

        A checkpoint that is being written is waited for, and an update that is made in the background; raises
        CheckpointError or OffloadError if it failed.
        """
        if not self._turn.is_over:
            with self._turn.of("engine.close()"):
                self._close()

    def _close(self) -> None:
        with ExitStack() as ending:
            ending.callback(self._leave)
            ending.callback(self._checkpointer.finish)
            self._update.close()

    def _leave(self) -> None:
        self._turn.close()
        self._preemption.disarm()
        self._parts.ledger.close()
        self.optimizer.close()
        for close in self._parts.close_last:
            close()
        self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._turn.is_over:
            self._checkpointer.abandon()  # the other ranks may be lost: nothing is waited for together
            self._leave()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    @property
    def _is_fp16(self) -> bool:
        return self.config.fp16.enabled

    def _run_pipeline(self, pipeline: Pipeline, given: Sequence[Any]) -> None:
        """All microbatches of a step forward and backward."""
        ready = [self._prepare(microbatch) for microbatch in given]
        self._guard.check()
        self._progress.enter(Activity.PIPELINE)
        self._update.begin_backward(boundary=True)
        self._guard.expect_update()
        self._losses = pipeline.train(given, ready, self._gradient_scale.seed)
        self._num_microbatches = len(given)

    def _check_has_whole(self, what: str, instead: str) -> None:
        if self._pipeline is not None:
            raise ValueError(
                f"{what}: expected a rank with the whole model, found stages {list(self._pipeline.plan.stages)} of "
                f"{self._pipeline.plan.split.num_stages} (parallel.pipeline); use {instead}, which works at every split"
            )

    def _prepare(self, batch: Any) -> Any:
        dtype = self._parts.compute_dtype if self._parts.casts_inputs else None
        return prepared(batch, self.device, dtype, self._gradient_scale.enter)

    @property
    def _timing(self) -> Timing:
        return Timing.of(self.config)

    def _forget_gradients(self) -> None:
        """The next microbatch is the first of its step."""
        self._update.take_back()  # what an error has interrupted
        for unit in self._sequence.units:
            for gradient in unit.gradients:
                gradient.reset()
                for param in gradient.group.params:
                    param.grad = None
        self._losses.clear()
        self._num_microbatches = 0

    @property
    def _gradients(self) -> list[GroupGradient]:
        return [gradient for unit in self._sequence.units for gradient in unit.gradients]

    def _raise_non_finite(self) -> None:
        outcome = (
            "The parameters whose gradients are finite were updated already (update_in_backward)."
            if self._update.timing is Timing.IN_BACKWARD
            else "No parameter was updated."
        )
        raise non_finite_error(self._mesh, self._gradients, self.global_step, outcome)

    def _save_if_due(self, save_failed: bool, is_preempted: int, is_interrupted: int) -> None:
        """What the `checkpoint` section asks for at the end of a step; all ranks come to the same answer.

        is_preempted: on how many ranks. is_interrupted: on how many of them by Ctrl-C: what started the job is not to
        go on as if it were done.
        """
        wanted = self.config.checkpoint
        if save_failed:
            try:
                self._checkpointer.finish()  # raises what went wrong in the background
            except CheckpointError as error:
                if not is_preempted:
                    raise
                logger.error("%s", error)  # the last save is still to be tried
        is_due = wanted.every_steps and self.global_step % wanted.every_steps == 0
        if wanted.folder is not None and (is_due or is_preempted):
            self._save_checkpoint(wanted.folder)
        if is_preempted:
            self._close()
            name = "SIGINT" if is_interrupted else "SIGTERM"
            logger.info("%s: step %d is saved in %s, leaving", name, self.global_step, wanted.folder)
            raise SystemExit(128 + signal.SIGINT if is_interrupted else 0)

    def _training_state(self) -> dict[str, Any]:
        """Where the run stands, beside tensors and what each rank has of its own."""
        return {
            "global_step": self.global_step,
            "num_steps": self.optimizer.num_steps,
            "optimizer": self.optimizer.kind,
            "learning_rates": self._learning_rates.state_dict(),
            "loss_scaler": self._scaler.state_dict(),
        }

    def _restore_training_state(self, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.global_step = saved["global_step"]
        self._scaler.load_state_dict(saved["loss_scaler"])
        then, now = ((values.get("optimizer") or {}).get("params", {}) for values in (config, self.config.as_dict()))
        self._learning_rates.load_state_dict(saved["learning_rates"], then, now)
        self._forget_gradients()
        self._guard.remember()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))}"
    return f"{type(value).__name__}"
