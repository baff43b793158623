"""The engine: a model, its sharded optimizer, and the steps of training."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ..comm import BODY, Activity, Progress
from ..model.compiled import refuse_to_be_traced
from ..zero.sequence import StateError
from .archive.archive import Archive
from .archive.frozen import FrozenValues
from .archive.full_values import give_own_storages
from .blueprint.axes import EXPERT, SEQUENCE
from .facade import ModuleFacade
from .model.given_model import refuse_copy
from .report.memory import ModelStateBytes, measure
from .report.memory_report import MemoryReport, MemoryReports
from .report.step_profile import StepProfile
from .step import clip_calls
from .step.added_groups import ADDING
from .step.averaged_weights import AveragedWeights
from .step.call_guard import CallGuard, exclusive
from .step.features import Access, StepResult
from .step.gradient_placeholders import GradientPlaceholders
from .step.join import NO_JOIN, NO_JOIN_BY_LAYERS, NO_JOIN_OF_EXPERTS, Call
from .step.learning_rates import TrainingState
from .step.offloaded_states import OffloadedStates
from .step.parts import Parts
from .step.step_gradients import StepGradients
from .step.step_sums import mean_over_ranks
from .step.steps import NO_BACKWARD


class Engine(ModuleFacade):
    """Trains one model as its config says.

        train_step(batch) = [forward, backward] x gradient_accumulation_steps, then step

    backward: unit by unit, gradients are reduced as they come (`zero.sequence`); at the accumulation boundary they
    are final. step: the exact global norm, clip factor, update of the shards, and new parameters for the next forward.
    Made by `lowtide.initialize`.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._features = parts.steps.features
        self._shown = self._features.get(GradientPlaceholders)
        self.config = parts.config
        self._module = parts.module
        self.optimizer = parts.optimizer
        self._mesh = parts.mesh
        self._runner = parts.runner
        self._call_guard = CallGuard(self._mesh.error_broadcast)
        self._steps = parts.steps
        self._state = TrainingState(parts.config, parts.optimizer, parts.learning_rates, self._steps.scale.loss_scaler)
        parts.runner.watch_backwards(self._steps, self._call_guard)
        if parts.optimizer.param_groups:
            parts.patches.callback(clip_calls.listen(self._clip_as_torch))
        self._register_groups(FrozenValues())
        parts.save = weakref.WeakMethod(self._save_checkpoint)
        self._added_groups = parts.added_groups
        parts.optimizer.listen(self._add_param_group)
        self._closing = ExitStack()  # the last one first
        for close in (self._mesh.close, *reversed(parts.close_last), self.optimizer.close, parts.patches.close):
            self._closing.callback(close)
        self._closing.callback(self._features.close)
        self._closing.callback(self._call_guard.close)
        parts.patches.belongs_to(self, self._closing.close)
        for module in parts.module.modules():
            parts.patches.override(module, "__reduce_ex__", refuse_copy)
        own_storages = partial(give_own_storages, parts.runner.passes.units)
        parts.patches.hook(parts.module.register_state_dict_post_hook(own_storages))  # type: ignore[no-untyped-call]
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
        return not self._call_guard.is_over

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
        return measure(self._runner.passes.units, self.optimizer)

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

    @exclusive
    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's share of a global batch, or on an iterator of microbatches.

        Raises NonFiniteGradientError where a gradient is not finite (float16: the step is skipped instead). After an
        error of all ranks alike the next call is a step of its own: no gradient of the failed one is left.
        """
        self._check_trains("engine.train_step")
        try:
            with self._mesh.error_broadcast.passes():
                self._runner.train(self._steps, batch)
        except BaseException:
            self._steps.forget()
            raise
        return self._step()

    @exclusive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with inputs on the device and in the compute dtype."""
        refuse_to_be_traced("an engine")
        with self._mesh.error_broadcast.passes():
            return self._runner.forward(self._steps, args, kwargs)

    @exclusive
    def backward(self, loss: Tensor) -> None:
        """Computes gradients of the mean loss over microbatches and ranks, and reduces them as the ZeRO stage says.

        Inputs and leaves that are not the engine's parameters get the gradient of `loss` itself.
        An error in it ends the step: its gradients are forgotten, and the next microbatch is the first of a new one.
        `loss.backward()` does the same, for any graph through what the engine has returned, of several engines too;
        only the loss in the result of the step is not known then (None): see `scale`.
        """
        self._check_trains("engine.backward")
        self._runner.backward(self._steps, loss)
        self._shown.put()

    @exclusive
    def step(self) -> StepResult:
        """Updates the parameters at the accumulation boundary; before it, only returns the last result.

        Raises StateError without a backward since the last step, or where none gave a parameter a gradient.
        """
        self._check_trains("engine.step")
        if not self.microbatches_done:
            raise StateError(NO_BACKWARD)
        return self._step(by_hand=True)

    def _step(self, by_hand: bool = False) -> StepResult:
        if not self._steps.accumulated.is_complete:
            return self._steps.last
        for feature in self._features.before_step:
            feature()
        with self._steps.join.together(Call.STEP):
            state = self._state
            self._steps.end(state.global_step, by_hand)
            result = self._steps.last
            if not result.skipped:
                state.learning_rates.advance()
            state.global_step += 1
            self._mesh.world.progress.end_step(state.global_step)
            try:
                for end in self._features.after_step:
                    end(state.global_step, result)
            except SystemExit:
                self._close()
                raise
            for begin in self._features.before_next_step:
                begin(state.global_step)
            return result

    @exclusive
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
                with self._mesh.error_broadcast.passes():
                    losses = self._runner.evaluate(self._steps, batch)
            finally:
                self.module.train(was_training)
            with self._steps.join.together(Call.EVALUATION) as num_ranks:
                return mean_over_ranks(self._mesh, losses, num_ranks)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # -- loops that call forward, backward and step themselves ----------------------------------------------------

    @exclusive
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function(*args, **kwargs)` returns, all of which is one forward of the engine.

        For trainers whose step calls the model, or parts of it, as it likes, and computes the loss itself: a method of
        the module, as Lightning's `training_step`. Inputs are passed as they are: on the device and in the dtype that
        the model computes in. Ranks that share layers (parallel.tensor) are given the same. Raises ValueError with
        parallel.pipeline, sequence and tensor_sequence, where a rank has a part of the model or of its inputs.
        """
        refuse_to_be_traced("an engine")
        parallel = self.config.parallel
        if parallel.sequence > 1 or parallel.tensor_sequence:
            found = "sequence" if parallel.sequence > 1 else "tensor_sequence"
            raise ValueError(
                f"engine.run(): expected a config without parallel.{found}, whose ranks have parts of the inputs, "
                "found it; call engine(...) with the inputs of the model"
            )
        with self._mesh.error_broadcast.passes():
            return self._runner.run(self._steps, function, args, kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, whose `backward()` is that of the engine: with float16's loss scale from the loss on, and with the
        loss in the result of the step. Its value is that of `loss`. Raises ValueError for what is no loss, ().
        """
        return self._runner.scale(self._steps, loss)

    def sequence_part(self, x: Tensor, fill: float = 0) -> Tensor:
        """This rank's part of x, (rows, tokens, ...), where ranks share sequences (`parallel.sequence`); else x.

        What `engine(...)` returns stands beside it: with it a loop computes a loss of its own from the part's logits.
        Labels are to stand where they are predicted (shifted by one, -100 for none). fill: of the tokens that are added
        where the ranks do not divide them. Ask for it before the forward, which needs no labels then.
        """
        return self._runner.model_call.own(x, fill)

    @exclusive
    def whole_output(self, output: Any, tokens: int) -> Any:
        """What `engine(...)` has returned, as one process has it, without gradients: for metrics and predictions.

        Logits of `parallel.tensor` that are in parts come as a tensor; of `parallel.sequence`, what has a rank's tokens
        along dimension 1 has those of all, and a loss, (), is the sum of the ranks' parts. Anything else is as it is.
        tokens: of the whole sequences, in dimension 1. Ranks that are given the same batch must all call it.
        """
        return self._runner.model_call.whole_output(output, tokens)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards are not the last of their step: `accumulate(last=False)`, as DDP calls it."""
        return self.accumulate(last=False)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """A context that says whether its backwards are the last of their step, after which `step` acts.

        For loops that count by themselves; a backward outside of any is then the last. Gradients are divided by
        gradient_accumulation_steps all the same: leave it at 1 and weigh the losses.
        """
        return self._steps.accumulated.accumulate(last)

    @property
    def microbatches_done(self) -> int:
        """How many backwards there were since the last step; without any `step` is an error."""
        return self._steps.accumulated.num_microbatches

    @property
    def is_step_complete(self) -> bool:
        """Whether the last backward was the last of its step, so that `step` updates."""
        return self._steps.accumulated.is_complete

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards may be the last of their step. As DDP's: it may be set before each forward, in the
        place of `accumulate(last=...)`. False holds until it is set again, True until the step has ended."""
        return self._steps.accumulated.may_be_last

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._steps.accumulated.say(last=bool(value))

    def count_by(self, is_last: Callable[[], bool], accumulation: int) -> None:
        """From now on `is_last()` says before each backward, `loss.backward()` too, whether it is the last of its step.

        For loops that count by calls of their own. accumulation: the microbatches of a step, for messages; gradients
        are divided as the config says.
        """
        self._steps.accumulated.count_by(is_last, accumulation)

    @exclusive
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what the backwards since the last step have added up, on all ranks; `step` does so by itself."""
        if self._steps.accumulated.num_microbatches:
            self._steps.join.check_outside("engine.zero_grad() in the middle of a step")
        self._steps.refuse_more("engine.zero_grad()")
        self._steps.forget(ends_graphs=False)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A context in which no parameter of the engine requires a gradient; that of its inputs is computed."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in trained:
                param.requires_grad_(True)

    @contextmanager
    def join(self) -> Iterator[None]:
        """For data that end earlier on some ranks: who leaves the loop goes on at the end of the context, without data.

            with engine.join():
                for batch in loader:  # of another length on each rank
                    engine.train_step(batch)

        Ranks without data take part in the steps of the others until all have run out. Gradient and loss are the mean
        over the microbatches that there were. All ranks must enter it; `train_step`, forward, `backward`,
        `clip_grad_norm_`, `step`, `eval_step` and `agree` may be in it, and what the config saves. Raises ValueError
        over a pipeline, layer by layer, or where ranks share layers, sequences or experts, StateError for other calls
        of all ranks in it, for those of other engines, and where another engine's is open.
        """
        self._call_guard.check("engine.join()")
        if not self._mesh.has_whole or self._mesh.axes[SEQUENCE].size > 1:
            raise ValueError(NO_JOIN)
        if self._mesh.axes[EXPERT].size > 1:
            raise ValueError(NO_JOIN_OF_EXPERTS)
        if self.config.zero_optimization.layered_gradient_accumulation:
            raise ValueError(NO_JOIN_BY_LAYERS)
        with self._mesh.error_broadcast.call("engine.join()", is_context=True), self._steps.join.opened():
            yield
            with self._call_guard.of("engine.join()"):
                for call in self._steps.join.calls_without_data():
                    self._take_part(call)

    def _take_part(self, call: Call) -> None:
        if call is Call.STEP:
            self._step()
        elif call is Call.CLIPPING:
            self._gradients.clip_without_data()
        elif call is Call.TAKING_BACK:
            self._steps.roll_back()
        elif call is Call.EVALUATION:
            mean_over_ranks(self._mesh, [], self._mesh.world.size)
        elif call is Call.AGREEMENT:
            self._count(False)
        else:
            self._runner.take_part(self._steps, call)

    @exclusive
    def agree(self, flag: bool | Tensor, how: Literal["any", "all"] = "any") -> bool:
        """Whether `flag` is true on any rank, or on all of them: the same answer everywhere. All ranks must call it.

        if engine.agree(loss < best_so_far + 0.01):  # some rank wants to stop: all do
            break
        """
        if how not in ("any", "all"):
            raise ValueError(f'engine.agree: expected how="any" or "all", found {how!r}')
        with self._steps.join.together(Call.AGREEMENT) as num_ranks:
            count = self._count(bool(flag))
        return count == num_ranks if how == "all" else count > 0

    def _count(self, flag: bool) -> int:
        """On how many ranks. A collective."""
        mine = torch.tensor([flag], dtype=torch.int64, device=self._mesh.world.device)
        return int(self._mesh.sum_small(mine, "engine.agree()"))

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
                self._call_guard.of(what),
                self._mesh.error_broadcast.call(f"{BODY}{what}", is_context=True),
                self._steps.apart(Activity.WEIGHTS, Access.CHANGES),
                values.modified(params),
            ):
                yield
            return
        self._call_guard.check(what)
        with (
            self._mesh.error_broadcast.call(what, is_context=True),
            self._steps.apart(Activity.WEIGHTS, Access.LOOKS),
            values.gathered(params, lambda: self._steps.num_changes),
        ):
            yield

    @exclusive
    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers under the model's own names, on the CPU, on rank 0; empty on other ranks.

        All ranks must call it. Gathered and copied unit by unit.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.state_dict()

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes over rank 0's full parameters and buffers, as `state_dict` gives them; other ranks may pass {}.

        All ranks must call it. Raises ValueError as `load_weights`, which reads files, and each rank its own part.
        """
        self._steps.forget()
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.load_state_dict(state_dict, strict)

    @exclusive
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

    @exclusive
    def load_weights(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Takes over the tensors of safetensors files, or of a checkpoint; each rank reads only what its shards hold.

        All ranks must call it. Raises ValueError, with all that is missing, extra or misshaped, before anything is
        changed; without `strict` missing and extra ones are logged. CheckpointError where a file cannot be read.
        """
        self._steps.forget()
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.load_weights(path, strict)

    # -- single parameters ----------------------------------------------------------------------------------------

    # By the parameter itself or by its name in the model. `state` is an optimizer state that has the shape of its
    # parameter, such as "exp_avg" and "exp_avg_sq". Without it the master weights are meant: float32 where parameters
    # are computed in half precision, else the parameter itself. All of it is in the master weights' dtype, also where
    # states have 8 bits, and wherever it rests.

    @exclusive
    def full(self, param: nn.Parameter | str, state: str | None = None) -> Tensor:
        """All of a parameter's master weights, or of a state, as a new tensor of its shape on every rank.

        All ranks must call it. Raises ValueError for what is no parameter, and for a state that it does not have.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.parameters.full(param, state, _what("full", "get_full", state))

    @exclusive
    def set_full(self, param: nn.Parameter | str, value: Tensor, state: str | None = None) -> None:
        """Sets what `full` shows to rank 0's `value`, of the parameter's shape and any dtype.

        All ranks must call it. What is computed with follows on all ranks. Raises ValueError as `full`, and for another
        shape.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.set_full(param, value, state, _what("set_full", "set_full", state))

    @exclusive
    def local(self, param: nn.Parameter | str, state: str | None = None) -> Tensor:
        """As `full`, but only what lies in this rank's shard, (n,), in the order of the flattened parameter.

        Nothing is moved between ranks; only where updates run in the background (`overlap` "delayed") must all ranks
        call it. n is 0 where the parameter does not reach into this rank's shard.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.parameters.local(param, state, _what("local", "get_local", state))

    @exclusive
    def set_local(self, param: nn.Parameter | str, value: Tensor, state: str | None = None) -> None:
        """Sets what `local` shows to `value`, (n,).

        All ranks must call it, each with its own part; ranks that hold the same part (replicas) with equal values.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.set_local(param, value, state, _what("set_local", "set_local", state))

    @exclusive
    def reset_states(self, *params: nn.Parameter | str) -> None:
        """Forgets the optimizer's states of these parameters, and their steps: the next step is their first one.

        As where their entries of a torch optimizer's `state` are deleted: for restarts of some weights, as in ReLoRA.
        Weights, and learning rates, stay as they are. All ranks must call it with the same, between steps: StateError
        at any other time. Raises ValueError for what is not trained, and with 1-bit optimizers.
        """
        self._steps.check_between("engine.reset_states()")
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.reset_states(params, "engine.reset_states()")

    @exclusive
    def gradient(self, param: nn.Parameter | str, local: bool = False) -> Tensor | None:
        """The gradient with which the step will update: the mean over microbatches and ranks, before clipping.

        Of the parameter's shape on every rank, then all ranks must call it; or only what lies in this rank's shard,
        (n,), as `local` cuts it. In the master weights' dtype, without float16's loss scale. None of a parameter that
        is not trained. To be called between a backward and `engine.step()`. Between the microbatches of a step it is
        of those so far; what is not summed over the ranks yet (stages 0 and 1, replicas) the call sums, but `local`
        raises StateError. StateError at any other time, and with `update_in_backward`: gradients are not held there.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            return self._gradients.gradient(param, local)

    @exclusive
    def set_gradient(self, param: nn.Parameter | str, value: Tensor | None, local: bool = False) -> None:
        """Sets what `gradient` shows: the norm of the step, its clipping and its update are of what was set.

        value: of the parameter's shape and any dtype, rank 0's; or with `local` this rank's part, (n,), ranks that hold
        the same part (replicas) with equal values; or None: the step leaves the parameter as it is, as torch does where
        `param.grad` is None. All ranks must call it, at the times of `gradient`, and before `clip_grad_norm_`:
        StateError at any other time. Raises ValueError for another shape, and for what is not trained.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            self._gradients.set_gradient(param, value, local)

    @exclusive
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of the coming step to `max_norm`, and returns their total norm over all ranks, ().

        They are multiplied by max_norm / (norm + 1e-6), where that is below 1. torch's own clip_grad_norm_ over
        `engine.parameters()` is this call. norm_type: 2 or inf. The norm is NaN where a gradient is not finite,
        RuntimeError with `error_if_nonfinite`. All ranks must call it, between the backward of the last microbatch and
        `engine.step()`: StateError at any other time, and with `update_in_backward`. ValueError where
        `gradient_clipping` of the config clips to another norm.
        """
        return self._gradients.clip(max_norm, norm_type, error_if_nonfinite)

    def _clip_as_torch(
        self, gradients: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor | None:
        """See `clip_calls.Clip`."""
        if not self._shown.are_all(gradients):
            return None
        return self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    @exclusive
    def clip_grad_value_(self, clip_value: float) -> None:
        """Makes each element of the gradients of the coming step at most `clip_value`, and at least -clip_value.

        As torch.nn.utils.clip_grad_value_, of the mean over microbatches and ranks. All ranks must call it, between the
        backward of the last microbatch and `engine.step()`, and before `clip_grad_norm_`: StateError at any other time,
        and with `update_in_backward`.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            self._gradients.clip_values(float(clip_value))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @exclusive
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
        if self._steps.accumulated.num_microbatches and not within_step:
            raise ValueError(
                f"save_checkpoint: expected a whole step, found {self._steps.accumulated.done}; gradients are not "
                "saved, so call it after engine.step() has acted"
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

    @exclusive
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
        if not self._call_guard.is_over:
            for feature in self._features.before_call:
                feature("engine.close()", Access.CLOSES)
            with self._call_guard.of("engine.close()"):
                self._close()

    def _close(self) -> None:
        with self._closing:
            self._closing.callback(self._archive.checkpoints.wait)
            self._steps.update.close()
            self._mesh.world.wait_for_device()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._call_guard.is_over:
            self._archive.checkpoints.wait_alone()  # the other ranks may be lost: nothing is waited for together
            self._closing.close()

    # -- calls between steps --------------------------------------------------------------------------------------

    @exclusive
    def offload_states(self, include: Collection[str] | None = None, pin_memory: bool = True) -> int:
        """Takes states from the device to host memory until `reload_states`; returns the bytes that it frees.

        include: of "optimizer" (its states, master weights, averages), "gradients" (what is kept of them between steps)
        and "parameters" (this rank's shards, where the stage frees parameters after use); None: all that there are.
        What rests on the host anyway stays there. pin_memory: of the copies. All ranks must call it, between steps.
        Until `reload_states` a training call, a change and a save raise StateError; without "parameters" the model can
        be run. Raises ValueError for other kinds, and OffloadError where the host has not enough memory.
        """
        return self._features.get(OffloadedStates).offload(include, pin_memory)

    @exclusive
    def reload_states(self) -> None:
        """What `offload_states` has taken is on the device again; without it nothing happens. Waits for the device.

        Raises torch's own error where the device has not enough memory; free some, and call it again.
        """
        self._features.get(OffloadedStates).reload()

    @exclusive
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
        return self._features.get(AveragedWeights).shown(self._call_guard, self._archive.swap)

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

    def _register_groups(self, frozen: FrozenValues) -> None:
        """What knows the groups of parameters as they are now. frozen: what is known of the values."""
        units, whole, features = self._runner.passes.units, self._runner.whole, self._features

        def note_exact() -> None:  # without self: hooks on the model reach it, and the engine goes with its last name
            for feature in features.after_refresh:
                feature()

        self._archive = self._parts.archive = Archive(
            self.config, self._mesh, self._module, units, self.optimizer, whole, frozen, note_exact
        )
        self._gradients = StepGradients(self.config, self._mesh, self._steps, self._archive.parameters)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """What `engine.optimizer.add_param_group` does."""
        with self._call_guard.of(ADDING):
            self._check_trains(ADDING)
            self._steps.check_between(ADDING)
            with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
                self._archive.checkpoints.wait()  # what is being saved is of the groups of before
                self._added_groups.add(param_group, self._state.learning_rates.check_takes)
                self._steps.register_groups()
                self._register_groups(self._archive.frozen)
                self._state.learning_rates.add(param_group)

    @property
    def _progress(self) -> Progress:
        return self._mesh.world.progress


def _what(call: str, safe: str, state: str | None) -> str:
    """How users read a call, in lowtide.deepspeed too."""
    values = "fp32_param" if state is None else "optimizer_state"
    return f"engine.{call}() (safe_{safe}_{values} in lowtide.deepspeed)"
