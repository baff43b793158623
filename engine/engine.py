"""The engine: a model, its sharded optimizer, and the steps of training."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checkpoint.files import CheckpointError
from ..comm import BODY, Activity, Progress
from ..model.compiled import refuse_to_be_traced
from ..watch.log import logger
from ..zero.sequence import StateError
from .archive.archive import Archive
from .archive.frozen import FrozenValues
from .archive.full_values import give_own_storages
from .facade import ModuleFacade
from .loop_calls import LoopCalls
from .model.given_model import refuse_copy
from .parameter_access import ParameterAccess
from .report.memory import ModelStateBytes, measure
from .report.memory_report import MemoryReport, MemoryReports
from .report.step_profile import StepProfile
from .step import clip_calls
from .step.averaged_weights import AveragedWeights
from .step.features import Access
from .step.join import Call
from .step.late_groups import ADDING
from .step.lent_states import LentStates
from .step.parts import Parts
from .step.preemption import Preemption
from .step.shown_gradients import ShownGradients
from .step.step_gradients import StepGradients
from .step.step_result import StepResult
from .step.step_sums import mean_over_ranks
from .step.steps import NO_BACKWARD
from .step.training_state import TrainingState
from .step.turn import Turn, in_turn


class Engine(LoopCalls, ParameterAccess, ModuleFacade):
    """Trains one model as its config says.

        train_step(batch) = [forward, backward] x gradient_accumulation_steps, then step

    backward: unit by unit, gradients are reduced as they come (`zero.sequence`); at the accumulation boundary they
    are final. step: the exact global norm, clip factor, update of the shards, and new parameters for the next forward.
    Made by `lowtide.initialize`.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._features = parts.steps.features
        self._shown = self._features.get(ShownGradients)
        self.config = parts.config
        self._module = parts.module
        self.optimizer = parts.optimizer
        self._mesh = parts.mesh
        self._driver = parts.driver
        self._turn = Turn(self._mesh.raised)
        self._steps = parts.steps
        self._state = TrainingState(parts.config, parts.optimizer, parts.learning_rates, self._steps.scale.loss_scaler)
        parts.driver.listen(self._steps, self._turn)
        if parts.optimizer.param_groups:
            parts.ledger.callback(clip_calls.listen(self._clip_as_torch))
        self._take_up_groups(FrozenValues())
        self._late_groups = parts.late_groups
        parts.optimizer.listen(self._add_param_group)
        self._preemption = Preemption()
        if parts.config.checkpoint.on_sigterm:
            self._preemption.arm(says_so=self.rank == 0)
        self._closing = ExitStack()  # the last one first
        for close in (self._mesh.close, *reversed(parts.close_last), self.optimizer.close, parts.ledger.close):
            self._closing.callback(close)
        self._closing.callback(self._features.close)
        self._closing.callback(self._preemption.disarm)
        self._closing.callback(self._turn.close)
        parts.ledger.belongs_to(self, self._closing.close)
        for module in parts.module.modules():
            parts.ledger.override(module, "__reduce_ex__", refuse_copy)
        own_storages = partial(give_own_storages, parts.driver.passes.units)
        parts.ledger.hook(parts.module.register_state_dict_post_hook(own_storages))  # type: ignore[no-untyped-call]
        for feature in self._features.before_next_step:
            feature(0)
        self._progress.stop_clock(Activity.BEFORE_FIRST_STEP)

    # -- who and where --------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model that is trained. `module.compile(...)` compiles the forwards of its parts by torch.compile."""
        return self._module

    @module.setter
    def module(self, other: object) -> None:
        raise AttributeError(
            f"engine.module: expected the model that was given to lowtide.initialize, found a {type(other).__name__} "
            "in its place, which the engine would not run; compile it by engine.module.compile(...), and for another "
            "model call initialize again"
        )

    @property
    def is_open(self) -> bool:
        """Until `close`, or an error on the way out of `with`."""
        return not self._turn.is_over

    @property
    def rank(self) -> int:
        return self._mesh.world.rank

    @property
    def world_size(self) -> int:
        return self._mesh.world.size

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks, by which data are divided. Without splits that is the world size."""
        return self._mesh.data_size

    @property
    def data_rank(self) -> int:
        """Whose share of the data this rank takes; ranks of one pipeline take the same."""
        return self._mesh.data_rank

    @property
    def device(self) -> torch.device:
        return self._mesh.world.device

    @property
    def global_step(self) -> int:
        """Steps so far, skipped ones too."""
        return self._state.global_step

    @global_step.setter
    def global_step(self, value: int) -> None:
        self._state.global_step = value

    @property
    def client_state(self) -> dict[str, Any]:
        """Saved with every checkpoint and restored with it: numbers, strings, ..., or what has a `state_dict()` and a
        `load_state_dict()`, such as a loader that knows its place in the data."""
        return self._state.client_state

    @client_state.setter
    def client_state(self, value: dict[str, Any]) -> None:
        self._state.client_state = value

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.optimizer.lr

    @property
    def loss_scale(self) -> float:
        """By which losses are multiplied; 1 but in float16."""
        return self._steps.scale.loss_scaler.scale

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that was passed to `initialize`; None where the config has one."""
        return self._state.learning_rates.scheduler

    def memory(self) -> ModelStateBytes:
        """Bytes of parameters, gradients and optimizer states on this rank, as they are now."""
        return measure(self._driver.passes.units, self.optimizer)

    def record_memory(self) -> AbstractContextManager[None]:
        """A context whose steps are recorded, operation by operation, for `memory_report`; of several the last one.

        Enter and leave it between steps. A recorded step takes several times as long, and computes the same.
        Raises ValueError at its end where there was no step in it.
        """
        return self._features.get(MemoryReports).recording()

    def memory_report(self) -> MemoryReport:
        """What this rank holds now, and of a recorded step the most, when, and who held it, beside what was predicted.

        A step is recorded by `record_memory`, or by the section `memory_report` of the config.
        """
        return self._features.get(MemoryReports).report(self.global_step)

    # -- training -------------------------------------------------------------------------------------------------

    @in_turn
    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's share of a global batch, or on an iterator of microbatches.

        Raises NonFiniteGradientError where a gradient is not finite (float16: the step is skipped instead). After an
        error of all ranks alike the next call is a step of its own: no gradient of the failed one is left.
        """
        self._check_trains("engine.train_step")
        try:
            with self._mesh.raised.passes():
                self._driver.train(self._steps, batch)
        except BaseException:
            self._steps.forget()
            raise
        return self._step()

    @in_turn
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with inputs on the device and in the compute dtype."""
        refuse_to_be_traced("an engine")
        with self._mesh.raised.passes():
            return self._driver.forward(self._steps, args, kwargs)

    @in_turn
    def backward(self, loss: Tensor) -> None:
        """Computes gradients of the mean loss over microbatches and ranks, and reduces them as the ZeRO stage says.

        Inputs and leaves that are not the engine's parameters get the gradient of `loss` itself.
        An error in it ends the step: its gradients are forgotten, and the next microbatch is the first of a new one.
        `loss.backward()` does the same, for any graph through what the engine has returned, of several engines too;
        only the loss in the result of the step is not known then (None): see `scale`.
        """
        self._check_trains("engine.backward")
        self._driver.backward(self._steps, loss)
        self._shown.put()

    @in_turn
    def step(self) -> StepResult:
        """Updates the parameters at the accumulation boundary; before it, only returns the last result.

        Raises StateError without a backward since the last step, or where none gave a parameter a gradient.
        """
        self._check_trains("engine.step")
        if not self.microbatches_done:
            raise StateError(NO_BACKWARD)
        return self._step(by_hand=True)

    def _step(self, by_hand: bool = False) -> StepResult:
        if not self._steps.so_far.is_complete:
            return self._steps.last
        for feature in self._features.before_step:
            feature()
        with self._steps.join.together(Call.STEP):
            return self._complete_step(by_hand)

    def _complete_step(self, by_hand: bool) -> StepResult:
        stop, state = self._preemption, self._state
        events = (self._archive.checkpoints.has_failed, stop.is_requested, stop.is_interrupt)
        counts = self._steps.end(state.global_step, events, by_hand)
        result = self._steps.last
        if not result.skipped:
            state.learning_rates.advance()
        state.global_step += 1
        self._progress.end_step(state.global_step)
        try:
            for feature in self._features.after_step:
                feature(state.global_step, result)
        except SystemExit:
            self._close()
            raise
        for begin in self._features.before_next_step:
            begin(state.global_step)
        self._save_if_due(*counts)
        return result

    @in_turn
    @torch.no_grad()
    def eval_step(self, batch: Any) -> Tensor:
        """The loss of a batch of any size, averaged over the ranks, without gradients and in eval mode.

        All ranks must call it. One rank alone evaluates by `engine(...)` under torch.no_grad(), at stage 3 inside of
        `with engine.gathered():`.
        """
        for feature in self._features.before_call:
            feature("engine.eval_step()", Access.LOOKS)
        with self._progress.during(Activity.EVALUATION):
            was_training = self.module.training
            self.module.eval()
            try:
                with self._mesh.raised.passes():
                    losses = self._driver.evaluate(self._steps, batch)
            finally:
                self.module.train(was_training)
            with self._steps.join.together(Call.EVALUATION) as num_ranks:
                return mean_over_ranks(self._mesh, losses, num_ranks)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # -- full values ----------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *params: nn.Parameter, modify: bool = False) -> Iterator[None]:
        """A context in which the given parameters (none: all) are full. All ranks must enter it.

        Until a step changes them, each rank may run the model in it by itself, or not.
        modify: they may also be changed, on every rank alike; the changes reach shards and master weights at the end.
        Without it a change raises ValueError on every rank at the end.
        """
        values = self._archive.values
        what = f"engine.gathered({'modify=True' if modify else ''}) (zero.GatheredParameters in lowtide.deepspeed)"
        if modify:
            # What is changed is in the engine when its turn has ended.
            with (
                self._turn.of(what),
                self._mesh.raised.call(f"{BODY}{what}", is_context=True),
                self._steps.apart(Activity.WEIGHTS, Access.CHANGES),
                values.modified(params),
            ):
                yield
            return
        self._turn.check(what)
        with (
            self._mesh.raised.call(what, is_context=True),
            self._steps.apart(Activity.WEIGHTS, Access.LOOKS),
            values.gathered(params, lambda: self._steps.num_changes),
        ):
            yield

    @in_turn
    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers under the model's own names, on the CPU, on rank 0; empty on other ranks.

        All ranks must call it. Gathered and copied unit by unit.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.state_dict()

    @in_turn
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes over rank 0's full parameters and buffers, as `state_dict` gives them; other ranks may pass {}.

        All ranks must call it. Raises ValueError as `load_weights`, which reads files, and each rank its own part.
        """
        self._steps.forget()
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.load_state_dict(state_dict, strict)

    @in_turn
    def export(
        self,
        folder: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        shard_bytes: int | str = 5_000_000_000,
        *,
        adapters_only: bool = False,
        merged: bool = False,
    ) -> None:
        """Writes parameters and persistent buffers as safetensors in the model's own names; `from_pretrained` reads it.

        dtype: "fp32", "bf16", "fp16", "fp64", a torch dtype, or None: as each parameter is computed. shard_bytes: of
        one file, also "500MB". All ranks must call it; each writes its own shards, nothing is gathered.
        adapters_only: one file that `PeftModel.from_pretrained` reads; of adapters that are not PEFT's, what is
        trained. merged: the model that PEFT has put adapters on, with them in its weights; gathers unit by unit.
        Raises CheckpointError on every rank where one could not write; an earlier export is as it was then.
        """
        if adapters_only and merged:
            raise ValueError("engine.export(): expected adapters_only or merged, found both; call it twice")
        if any(forbids("export") for forbids in self._features.forbids_files):
            return
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            if adapters_only:
                self._archive.export_adapters(folder, dtype, shard_bytes)
            elif merged:
                self._archive.export_merged(folder, dtype, shard_bytes)
            else:
                self._archive.export(folder, dtype, shard_bytes)

    @in_turn
    def load_weights(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Takes over the tensors of safetensors files, or of a checkpoint; each rank reads only what its shards hold.

        All ranks must call it. Raises ValueError, with all that is missing, extra or misshaped, before anything is
        changed; without `strict` missing and extra ones are logged. CheckpointError where a file cannot be read.
        """
        self._steps.forget()
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.load_weights(path, strict)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @in_turn
    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        latest: bool = True,
        *,
        within_step: bool = False,
    ) -> str:
        """Saves all that the training is into folder/tag, and makes `latest` name it; returns the tag.

        tag: "global_step100" and so on where none is given; rank 0's counts. client_state: saved beside
        `engine.client_state`. latest: False leaves the file `latest` as it is. within_step: it may also be called
        between the microbatches of a step, whose gradients are not saved: after a load that step begins anew. Call it
        on all ranks. With `checkpoint.async` it returns when the values are copied; a failure is raised at the next
        step, save or close.

        Raises CheckpointError on every rank if any fails (what was saved before is intact), and ValueError between the
        microbatches of a step without `within_step`.
        """
        return self._save_checkpoint(folder, tag, client_state, latest, within_step)

    def _save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        latest: bool = True,
        within_step: bool = False,
    ) -> str:
        for feature in self._features.before_call:
            feature("engine.save_checkpoint()", Access.CHANGES)
        for pause in self._features.between_steps:
            pause("engine.save_checkpoint()")
        if self._steps.so_far.num_microbatches and not within_step:
            raise ValueError(
                f"save_checkpoint: expected a whole step, found {self._steps.so_far.done}; gradients are not saved, "
                "so call it after engine.step() has acted"
            )
        self._steps.refuse_more("engine.save_checkpoint()")  # what the step's last backward has updated already
        if any(forbids("checkpoint") for forbids in self._features.forbids_files):
            return tag or f"global_step{self.global_step}"
        for flush in self._features.before_save:
            flush()
        with self._steps.apart(Activity.SAVING, Access.READS):
            self._archive.values.make_copies_exact()  # so that who goes on from here has the bits of this training
            state = {**self.client_state, **(client_state or {})}
            training = self._state.described()
            return self._archive.checkpoints.save(folder, tag, state, self.global_step, training, latest)

    @in_turn
    def load_checkpoint(self, folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
        """Goes on where a checkpoint was saved, whatever its number of ranks and ZeRO stage; returns its client state.

        tag: None for the latest. What stands in `engine.client_state` is restored in place. Options of the optimizer
        are those of the group that a parameter was in, except those that the config now says otherwise. With another
        number of ranks the random generators go on as they are, and the client state is that of rank 0.

        Raises NoCheckpointError where there is none; CheckpointError where a file is missing, truncated or altered, or
        the checkpoint is of another model.
        """
        self._steps.forget()
        with self._steps.apart(Activity.LOADING, Access.REPLACES):
            restored = self._archive.checkpoints.load(folder, tag, self.client_state, self.lr_scheduler)
            self._state.restore(restored.training, restored.config)
        for feature in self._features.after_load:
            feature(self.global_step)
        self._state.restore_client_state(restored.client_state)
        return restored.client_state

    def close(self) -> None:
        """Takes the hooks off and leaves the process group, where an engine made it. No call is possible then.

        A checkpoint that is being written is waited for, and an update that is made in the background; raises
        CheckpointError or OffloadError if it failed.
        """
        if not self._turn.is_over:
            for feature in self._features.before_call:
                feature("engine.close()", Access.CLOSES)
            with self._turn.of("engine.close()"):
                self._close()

    def _close(self) -> None:
        with self._closing:
            self._closing.callback(self._archive.checkpoints.wait)
            self._steps.update.close()
            self._mesh.world.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._turn.is_over:
            self._archive.checkpoints.wait_alone()  # the other ranks may be lost: nothing is waited for together
            self._closing.close()

    # -- calls between steps --------------------------------------------------------------------------------------

    @in_turn
    def offload_states(self, include: Collection[str] | None = None, pin_memory: bool = True) -> int:
        """Takes states from the device to host memory until `reload_states`; returns the bytes that it frees.

        include: of "optimizer" (its states, master weights, averages), "gradients" (what is kept of them between steps)
        and "parameters" (this rank's shards, where the stage frees parameters after use); None: all that there are.
        What rests on the host anyway stays there. pin_memory: of the copies. All ranks must call it, between steps.
        Until `reload_states` a training call, a change and a save raise StateError; without "parameters" the model can
        be run. Raises ValueError for other kinds, and OffloadError where the host has not enough memory.
        """
        return self._features.get(LentStates).lend(include, pin_memory)

    @in_turn
    def reload_states(self) -> None:
        """What `offload_states` has taken is on the device again; without it nothing happens. Waits for the device.

        Raises torch's own error where the device has not enough memory; free some, and call it again.
        """
        self._features.get(LentStates).take_back()

    @in_turn
    def ema(self, decay: float = 0.999) -> None:
        """From now on each step that is not skipped updates an average: decay x average + (1 - decay) x weight.

        The numbers of torch's AveragedModel with get_ema_multi_avg_fn(decay): the first step copies the weights. Master
        weights are averaged where there are any, in their dtype, and at least float32; buffers are not. Call it once,
        on all ranks, after `initialize`, and before `load_checkpoint` to go on with averages that were saved. Takes
        that much memory, which `memory()` counts with the optimizer. Raises ValueError for a decay that is not from 0
        to 1, and where it was called before.
        """
        self._features.get(AveragedWeights).keep(decay)

    def ema_weights(self) -> AbstractContextManager[None]:
        """A context in which the averages are the weights: for `eval_step`, forwards, `state_dict` and `export`.

        All ranks must enter and leave it. In the end every weight has the bits that it had before. Raises ValueError
        where `ema` was not called; what would change the weights in it (`backward`, `step`, `gathered(modify=True)`,
        `load_weights`, ...) or leave them as those of the training (`save_checkpoint`, `close`) raises
        StateError.
        """
        return self._features.get(AveragedWeights).shown(self._turn, self._archive.swap)

    def profile(self, steps: int = 1) -> StepProfile:
        """What the next `steps` steps do is recorded: a trace, each collective, operations by module.

        They take several times as long. The result has `is_done` after them, `table()` and `save(folder)`. Raises
        ValueError where a profile is being made.
        """
        return StepProfile(self._parts, self.global_step, steps)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _check_trains(self, call: str) -> None:
        """Raises ValueError in an engine without an optimizer."""
        if not self.optimizer.param_groups:
            raise ValueError(
                f"{call}: expected an engine with an optimizer, found one without; put one into the config, or give it "
                "to lowtide.initialize(..., optimizer=...). This one computes: engine(...), engine.eval_step(batch)"
            )

    def _take_up_groups(self, frozen: FrozenValues) -> None:
        """What knows the groups of parameters as they are now. frozen: what is known of the values."""
        units, whole = self._driver.passes.units, self._driver.whole

        def note_exact() -> None:
            for feature in self._features.after_refresh:
                feature()

        self._archive = Archive(self.config, self._mesh, self._module, units, self.optimizer, whole, frozen, note_exact)
        self._gradients = StepGradients(self.config, self._mesh, self._steps, self._archive.parameters)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """What `engine.optimizer.add_param_group` does."""
        with self._turn.of(ADDING):
            self._check_trains(ADDING)
            self._steps.check_between(ADDING)
            with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
                self._archive.checkpoints.wait()  # what is being saved is of the groups of before
                self._late_groups.add(param_group, self._state.learning_rates.check_takes)
                self._steps.take_up_groups()
                self._take_up_groups(self._archive.frozen)
                self._state.learning_rates.add(param_group)

    @property
    def _progress(self) -> Progress:
        return self._mesh.world.progress

    def _save_if_due(self, save_failed: int, is_preempted: int, is_interrupted: int) -> None:
        """What the `checkpoint` section asks for at the end of a step; all ranks come to the same answer.

        is_preempted: on how many ranks. is_interrupted: on how many of them by Ctrl-C: what started the job is not to
        go on as if it were done.
        """
        wanted = self.config.checkpoint
        if save_failed:
            try:
                self._archive.checkpoints.wait()  # raises what went wrong in the background
            except CheckpointError as error:
                if not is_preempted:
                    raise
                logger.error("%s", error)  # the last save is still to be tried
        is_due = wanted.every_steps and self.global_step % wanted.every_steps == 0
        if wanted.folder is not None and (is_due or is_preempted):
            self._save_checkpoint(wanted.folder)
        if is_preempted:
            self._preemption.leave()
            self._close()
            name = "SIGINT" if is_interrupted else "SIGTERM"
            logger.info("%s: step %d is saved in %s, leaving", name, self.global_step, wanted.folder)
            raise SystemExit(128 + signal.SIGINT if is_interrupted else 0)
