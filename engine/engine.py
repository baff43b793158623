"""The engine: the public object of a training."""

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
from .archive import weights
from .archive.archive import Archive
from .archive.frozen import Frozen
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
    """Trains a model as its config says.

        train_step(batch) = [forward, backward] x gradient_accumulation_steps, then step

    backward: gradients are reduced unit by unit as they arrive (`zero.sequence`); after the last microbatch they are
    final. step: exact global norm, clip factor, update of the shards, and new parameters for the next forward. Made by
    `lowtide.initialize`.
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
        # An engine that does not train has no gradients to clip, so torch's functions are not replaced.
        if parts.optimizer.param_groups:
            parts.patches.callback(clip_calls.listen(self._clip_as_torch))
        self._register_groups(None)
        # Not `save_checkpoint`: a checkpoint that is due is saved inside of `step`, which holds the turn.
        parts.save = weakref.WeakMethod(self._save_checkpoint)
        self._added_groups = parts.added_groups
        parts.optimizer.listen(self._add_param_group)
        self._closing = ExitStack()
        # The last callback runs first: patches, since hooks use the optimizer and stores. The mesh, which all use, is
        # closed at the end.
        for close in (self._mesh.close, *reversed(parts.close_last), self.optimizer.close, parts.patches.close):
            self._closing.callback(close)
        self._closing.callback(self._features.close)
        self._closing.callback(self._call_guard.close)
        # The callbacks must not refer to this engine: `ModelPatches` closes an engine that was collected while open.
        parts.patches.belongs_to(self, self._closing.close)
        for module in parts.module.modules():
            parts.patches.override(module, "__reduce_ex__", refuse_copy)
        own_storages = partial(give_own_storages, parts.runner.passes.units)
        parts.patches.hook(parts.module.register_state_dict_post_hook(own_storages))  # type: ignore[no-untyped-call]
        # Recordings of the first step begin here: no `step` precedes it.
        for feature in self._features.before_next_step:
            feature(0)
        self._progress.stop_clock(Activity.BEFORE_FIRST_STEP)

    # -- ranks, devices and counts --------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model that is trained. `module.compile(...)` compiles the forwards of its parts by torch.compile."""
        return self._module

    @module.setter
    def module(self, other: object) -> None:
        raise AttributeError(
            f"engine.module: expected the model of lowtide.initialize, found an assigned {type(other).__name__}, "
            "which the engine would not run; compile the model by engine.module.compile(...), or call initialize with "
            "the new model"
        )

    @property
    def is_open(self) -> bool:
        """Return True until `close`, or until an error leaves the `with` block."""
        return not self._call_guard.is_over

    @property
    def rank(self) -> int:
        return self._mesh.world.rank

    @property
    def world_size(self) -> int:
        return self._mesh.world.size

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks, over which data are divided. Without splits it is the world size."""
        return self._mesh.data_size

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the data. The ranks of a pipeline take the same share."""
        return self._mesh.data_rank

    @property
    def device(self) -> torch.device:
        return self._mesh.world.device

    @property
    def global_step(self) -> int:
        """The number of steps so far, also skipped steps."""
        return self._state.global_step

    @global_step.setter
    def global_step(self, value: int) -> None:
        self._state.global_step = value

    @property
    def client_state(self) -> dict[str, Any]:
        """State that is saved and restored with each checkpoint: numbers, strings, and objects with `state_dict()` and
        `load_state_dict()`, such as a loader that knows its position in the data.
        """
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
        """The factor of losses in float16; else 1."""
        return self._steps.scale.loss_scaler.scale

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that was passed to `initialize`; None if the config has it."""
        return self._state.learning_rates.scheduler

    def memory(self) -> ModelStateBytes:
        """Return the bytes of parameters, gradients and optimizer states on this rank now."""
        return measure(self._runner.passes.units, self.optimizer)

    def record_memory(self) -> AbstractContextManager[None]:
        """Record the steps in this context, operation by operation, for `memory_report`. The last step counts.

        Enter and leave it between steps. A recorded step takes several times as long, and computes the same. Raises
        ValueError at its end if it had no step.
        """
        return self._features.get(MemoryReports).recording()

    def memory_report(self) -> MemoryReport:
        """Return this rank's present memory, the peak of a recorded step (its moment and owners), and the prediction.

        A step is recorded by `record_memory`, or by the section `memory_report` of the config.
        """
        return self._features.get(MemoryReports).report(self.global_step)

    # -- training -------------------------------------------------------------------------------------------------

    @exclusive
    def train_step(self, batch: Any) -> StepResult:
        """Run an optimizer step on this rank's share of a global batch, or on an iterator of microbatches.

        Raises NonFiniteGradientError if a gradient is not finite (float16 skips the step instead). If all ranks raise
        an error before the update, the next call begins a new step without old gradients.
        """
        self._check_trains("engine.train_step")
        try:
            with self._mesh.error_broadcast.passes():
                self._runner.train(self._steps, batch)
            return self._step()
        except BaseException as error:
            # Also for errors in forwards, loaders and features: only errors in backwards reach `abort_backward`.
            if self.is_open:  # else `_step` has closed the engine after the update
                self._steps.forget(error=error)
            raise

    @exclusive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, with inputs on the device and in the compute dtype."""
        refuse_to_be_traced("an engine")
        with self._mesh.error_broadcast.passes():
            return self._runner.forward(self._steps, args, kwargs)

    @exclusive
    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the mean loss over microbatches and ranks, and reduce them as the ZeRO stage says.

        Inputs, and leaves outside of the engine, get the gradient of `loss` itself. An error ends the step: its
        gradients are forgotten, and the next microbatch is the first of a new step (see `microbatches_lost`).
        `loss.backward()` does the same for any graph through the output of the engine, also of several engines; but
        then the result of the step has no loss (None): see `scale`.
        """
        self._check_trains("engine.backward")
        self._runner.backward(self._steps, loss)
        self._shown.put()

    @exclusive
    def step(self) -> StepResult:
        """Update the parameters after the last microbatch of a step; before it, only return the last result.

        Raises StateError without a backward since the last step, or if no parameter got a gradient.
        """
        self._check_trains("engine.step")
        if self.microbatches_lost:
            self._steps.accumulated.refuse_lost("engine.step()")
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
            state.global_step += 1
            self._mesh.world.progress.end_step(state.global_step)
            try:
                for end in self._features.after_step:
                    end(state.global_step, result)
            except SystemExit:
                # The script ends here (a trial, or a checkpoint on SIGTERM), while all ranks are at the same place.
                self._close()
                raise
            for begin in self._features.before_next_step:
                begin(state.global_step)
            return result

    @exclusive
    @torch.no_grad()
    def eval_step(self, batch: Any) -> Tensor:
        """Return the loss of a batch of any size, averaged over the ranks, without gradients and in eval mode.

        All ranks must call it. To evaluate on a single rank, call `engine(...)` under torch.no_grad(), at stage 3
        inside of `with engine.gathered():`.
        """
        for feature in self._features.before_call:
            feature("engine.eval_step()", Access.LOOKS)
        with self._progress.during(Activity.EVALUATION):
            # The mode of each part: the caller may keep a part in eval mode, for example a frozen batch norm.
            modes = [(part, part.training) for part in self.module.modules()]
            self.module.eval()
            try:
                with self._mesh.error_broadcast.passes():
                    losses = self._runner.evaluate(self._steps, batch)
            finally:
                for part, was_training in modes:
                    part.training = was_training
            # Forwards above agree by themselves. Only the mean is a call that ranks without data have to repeat.
            with self._steps.join.together(Call.EVALUATION) as num_ranks:
                return self._mean(losses, num_ranks)

    def _mean(self, losses: Sequence[Tensor], num_ranks: int) -> Tensor:
        # A rank whose forward has called blocks in another order may need more gathers.
        self._steps.await_others()
        return mean_over_ranks(self._mesh, losses, num_ranks)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # -- loops that call forward, backward and step themselves ----------------------------------------------------

    @exclusive
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(*args, **kwargs), and count it as a single forward of the engine.

        For trainers whose step calls the model, or parts of it, in any way, and computes the loss itself: a method of
        the module, such as Lightning's `training_step`. Inputs are passed unchanged: give them on the device and in
        the compute dtype. Ranks that share layers (parallel.tensor) must get the same inputs. Raises ValueError with
        parallel.pipeline, sequence and tensor_sequence: there a rank has a part of the model or of its inputs.
        """
        refuse_to_be_traced("an engine")
        parallel = self.config.parallel
        if parallel.sequence > 1 or parallel.tensor_sequence:
            found = "sequence" if parallel.sequence > 1 else "tensor_sequence"
            raise ValueError(
                f"engine.run(): expected a config without parallel.{found}, found it: its ranks have parts of the "
                "inputs; call engine(...) with the inputs of the model"
            )
        with self._mesh.error_broadcast.passes():
            return self._runner.run(self._steps, function, args, kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, so that its `backward()` does the same as `engine.backward`.

        So float16's loss scale applies from the loss on, and the result of the step has the loss. Its value does not
        change. Raises ValueError if it is no loss, ().
        """
        return self._runner.scale(self._steps, loss)

    def sequence_part(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's part of x, (rows, tokens, ...), if ranks share sequences (`parallel.sequence`); else x.

        The part has the tokens of the output of `engine(...)`, so a loop can compute its loss from the part's logits.
        Shift labels first: each label at the token that predicts it, -100 for no label. fill: value of added tokens if
        the ranks do not divide the number of tokens. Call it before the forward, which then needs no labels.
        """
        return self._runner.model_call.own(x, fill)

    @exclusive
    def whole_output(self, output: Any, tokens: int) -> Any:
        """Return the output of `engine(...)` as a single process has it, without gradients, for metrics.

        With `parallel.tensor`, vocab-parallel logits become a whole tensor. With `parallel.sequence`, tensors with a
        rank's tokens in dimension 1 get all tokens, and a loss, (), is summed over the ranks' parts. Anything else is
        unchanged. tokens: their number in a whole sequence. All ranks with the same batch must call it.
        """
        return self._runner.model_call.whole_output(output, tokens)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in this context do not complete the step: `accumulate(last=False)`, under DDP's name."""
        return self.accumulate(last=False)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """In this context `last` says whether backwards complete the step, so that `step` updates.

        For loops that count microbatches themselves. A backward outside of such a context then completes the step.
        Gradients are still divided by gradient_accumulation_steps: leave it at 1 and weigh the losses.
        """
        return self._steps.accumulated.accumulate(last)

    @property
    def microbatches_done(self) -> int:
        """The number of backwards since the last step. If it is 0, `step` is an error."""
        return self._steps.accumulated.num_microbatches

    @property
    def microbatches_lost(self) -> int:
        """How many backwards an error in a later backward has dropped, if the loop says which is last. If it
        is not 0, backwards and `step` are errors until `zero_grad`: begin the step again.
        """
        self._call_guard.check("engine.microbatches_lost")  # notices the end of a `loss.backward()` that has failed
        return self._steps.accumulated.num_lost

    @property
    def is_step_complete(self) -> bool:
        """Whether the last backward completed the step, so that `step` updates."""
        return self._steps.accumulated.is_complete

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards may complete the step. As in DDP, it may be set before each forward instead of
        `accumulate(last=...)`. False holds until it is set again, True until the step has ended.
        """
        return self._steps.accumulated.may_be_last

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._steps.accumulated.say(last=bool(value))

    def count_by(self, is_last: Callable[[], bool], accumulation: int) -> None:
        """Let `is_last()` say before each backward, also `loss.backward()`, whether it completes the step.

        For loops that count by their calls. accumulation: microbatches of a step, for messages; gradients are divided
        as the config says.
        """
        self._steps.accumulated.count_by(is_last, accumulation)

    @exclusive
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step, on all ranks. `step` does so itself."""
        if self._steps.accumulated.num_microbatches:
            self._steps.join.check_outside("engine.zero_grad() in the middle of a step")
        self._steps.refuse_more("engine.zero_grad()")
        # Graphs of forwards before this call may still be differentiated: their parameters stay.
        self._steps.forget(ends_graphs=False)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """In this context no parameter of the engine requires a gradient. Inputs still get gradients."""
        # Only these, so that parameters that the caller has frozen stay frozen at the end.
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
        """A context for data that end earlier on some ranks: a rank that leaves the loop takes part without data.

            with engine.join():
                for batch in loader:  # of another length on each rank
                    engine.train_step(batch)

        Ranks without data take part in the steps until all ranks have run out. Gradient and loss are the mean over the
        existing microbatches. All ranks must enter it. `train_step`, forward, `backward`, `clip_grad_norm_`, `step`,
        `eval_step` and `agree` may be in it, and saves by the config. Raises ValueError over a pipeline, layer by
        layer, and if ranks share layers, sequences or experts. Raises StateError for other collective calls inside it,
        for those of other engines, and inside of another engine's join.
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
            # Not in a `finally`: after an error this rank leaves, and must not take part in further calls.
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
            self._mean([], self._mesh.world.size)
        elif call is Call.AGREEMENT:
            self._count(False)
        else:
            self._runner.take_part(self._steps, call)

    @exclusive
    def agree(self, flag: bool | Tensor, how: Literal["any", "all"] = "any") -> bool:
        """Return whether `flag` is true on any rank, or on all: the same answer everywhere. All ranks must call it.

        if engine.agree(loss < best_so_far + 0.01):  # if any rank wants to stop, all do
            break
        """
        if how not in ("any", "all"):
            raise ValueError(f'engine.agree: expected how="any" or "all", found {how!r}')
        with self._steps.join.together(Call.AGREEMENT) as num_ranks:
            count = self._count(bool(flag))
        # `num_ranks` leaves out ranks without data (`join`), which add 0.
        return count == num_ranks if how == "all" else count > 0

    def _count(self, flag: bool) -> int:
        """Return on how many ranks the flag is true. A collective."""
        self._steps.await_others()
        mine = torch.tensor([flag], dtype=torch.int64, device=self._mesh.world.device)
        return int(self._mesh.sum_small(mine, "engine.agree()"))

    # -- full values ----------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *params: nn.Parameter, modify: bool = False) -> Iterator[None]:
        """In this context the given parameters (none: all) are full. All ranks must enter it.

        Each rank may run the model inside it alone, until a step changes the parameters. modify: parameters may be
        changed inside, on every rank alike; the changes reach shards and master weights at the end. Without it a
        change raises ValueError on every rank at the end.
        """
        values = self._archive.values
        what = f"engine.gathered({'modify=True' if modify else ''}) (zero.GatheredParameters in lowtide.deepspeed)"
        if modify:
            # The order matters: the changes must be in the engine before its turn ends.
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
        """Return full parameters and buffers under the model's names, on the CPU, on rank 0; {} elsewhere.

        All ranks must call it. Gathers and copies unit by unit.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.state_dict()

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load rank 0's full parameters and buffers, in the form of `state_dict`; rank 1 and so on may pass {}.

        All ranks must call it. Raises ValueError as `load_weights`, which reads files, each rank only its shards.
        """
        # Gradients of a step that has begun belong to the weights of before.
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
        """Write parameters and persistent buffers as safetensors under the model's names, for `from_pretrained`.

        dtype: "fp32", "bf16", "fp16", "fp64", a torch dtype, or None: the compute dtype of each parameter.
        shard_bytes: of a file, also "500MB". All ranks must call it; each writes its shards, and nothing is gathered.
        adapters_only: a single file for `PeftModel.from_pretrained`; without PEFT it has the trained parameters.
        merged: the base model of PEFT with the adapters merged into its weights; gathers unit by unit. Raises
        CheckpointError on every rank if a rank could not write; then an earlier export is unchanged.
        """
        if adapters_only and merged:
            raise ValueError("engine.export(): expected adapters_only or merged, found both; call it twice")
        if any(forbids("export") for forbids in self._features.forbids_files):
            return
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            named, values = self._archive.named, self._archive.values
            if adapters_only:
                weights.export_adapters(named, folder, dtype, shard_bytes)
            elif merged:
                weights.export_merged(named, values, folder, dtype, shard_bytes)
            else:
                weights.export(named, folder, dtype, shard_bytes)

    @exclusive
    def load_weights(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Load the tensors of safetensors files, or of a checkpoint. Each rank reads only the ranges of its shards.

        All ranks must call it. Raises ValueError, with all missing, extra and misshaped tensors, before any change;
        without `strict` missing and extra tensors are only logged. Raises CheckpointError if a file cannot be read.
        """
        self._steps.forget()
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.load_weights(path, strict)

    # -- single parameters ----------------------------------------------------------------------------------------

    # A parameter is given by itself or by its name in the model. `state` is an optimizer state with the shape of its
    # parameter, such as "exp_avg" and "exp_avg_sq". Without `state` the calls are about master weights: float32 for
    # parameters that are computed in half precision, else the parameter itself. Values have the master weights' dtype,
    # also of 8-bit states, and wherever they are stored.

    @exclusive
    def full(self, param: nn.Parameter | str, state: str | None = None) -> Tensor:
        """Return all of a parameter's master weights, or of a state, as a new tensor of its shape on every rank.

        All ranks must call it. Raises ValueError if it is no parameter, or lacks the state.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.parameters.full(param, state, _what("full", "get_full", state))

    @exclusive
    def set_full(self, param: nn.Parameter | str, value: Tensor, state: str | None = None) -> None:
        """Set the value that `full` shows to rank 0's `value`, of the parameter's shape and any dtype.

        All ranks must call it. Compute copies follow on all ranks. Raises ValueError as `full`, and for another shape.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.set_full(param, value, state, _what("set_full", "set_full", state))

    @exclusive
    def local(self, param: nn.Parameter | str, state: str | None = None) -> Tensor:
        """Return the part of `full` in this rank's shard, (n,), in the order of the flattened parameter.

        Moves nothing between ranks. All ranks must call it only if updates run in the background (`overlap`
        "delayed"). n is 0 if this rank's shard has no part of the parameter.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS, alone=True):
            return self._archive.parameters.local(param, state, _what("local", "get_local", state))

    @exclusive
    def set_local(self, param: nn.Parameter | str, value: Tensor, state: str | None = None) -> None:
        """Set the value that `local` shows to `value`, (n,).

        All ranks must call it, each with its own part; ranks that hold the same part (replicas) with equal values.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.set_local(param, value, state, _what("set_local", "set_local", state))

    @exclusive
    def reset_states(self, *params: nn.Parameter | str) -> None:
        """Reset the optimizer's states and step counts of these parameters: the next step is their first.

        As if their entries of a torch optimizer's `state` were deleted: for restarts of some weights, as in ReLoRA.
        Weights and learning rates do not change. All ranks must call it with the same parameters, between steps:
        StateError at a different time. Raises ValueError for frozen parameters, and with 1-bit optimizers.
        """
        self._steps.check_between("engine.reset_states()")
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.reset_states(params, "engine.reset_states()")

    @exclusive
    def gradient(self, param: nn.Parameter | str, local: bool = False) -> Tensor | None:
        """Return the gradient of the coming update: the mean over microbatches and ranks, before clipping.

        It has the parameter's shape on every rank, and all ranks must call it; or with `local` it is the part in this
        rank's shard, (n,). It has the master weights' dtype, without float16's loss scale. None for a frozen
        parameter, and without `local` if no rank has used it. Call it between a backward and `engine.step()`. Between
        microbatches it has those so far: the call sums terms that are not reduced yet (stages 0 and 1, replicas), but
        `local` raises StateError. StateError at a different time, and with `update_in_backward`: it keeps no gradients.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            return self._gradients.gradient(param, local)

    @exclusive
    def set_gradient(self, param: nn.Parameter | str, value: Tensor | None, local: bool = False) -> None:
        """Set the value that `gradient` shows. Norm, clipping and update of the step use it.

        value: rank 0's, of the parameter's shape and any dtype; or with `local` this rank's part, (n,), equal on
        replicas; or None: the step leaves the parameter unchanged, as torch does if `param.grad` is None. All ranks
        must call it, at the times of `gradient`, and before `clip_grad_norm_`: StateError at a different time. Raises
        ValueError for another shape, and for a frozen parameter.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            self._gradients.set_gradient(param, value, local)

    @exclusive
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the coming step to `max_norm`, and return their total norm over all ranks, ().

        They are multiplied by max_norm / (norm + 1e-6), if that is below 1. torch's clip_grad_norm_ over
        `engine.parameters()` is this call. norm_type: 2 or inf. If a gradient is not finite, the norm is NaN; with
        `error_if_nonfinite` RuntimeError. All ranks must call it, between the backward of the last microbatch and
        `engine.step()`: StateError otherwise, and with `update_in_backward`. ValueError if `gradient_clipping` of the
        config clips to another norm.
        """
        return self._gradients.clip(max_norm, norm_type, error_if_nonfinite)

    def _clip_as_torch(
        self, gradients: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor | None:
        """See `clip_calls.Clip`."""
        if not self._shown.final.are_all(gradients):
            return None
        return self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    @exclusive
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp each element of the gradients of the coming step to [-clip_value, clip_value].

        Like torch.nn.utils.clip_grad_value_, on the mean over microbatches and ranks. All ranks must call it, between
        the backward of the last microbatch and `engine.step()`, and before `clip_grad_norm_`: StateError at a
        different time, and with `update_in_backward`.
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
        """Save the whole state of the training into folder/tag, let `latest` name it, and return the tag.

        tag: default "global_step100" and so on; rank 0's counts. client_state: saved in addition to
        `engine.client_state`. latest: False leaves the file `latest` unchanged. within_step: allow the call between
        the microbatches of a step, whose gradients are not saved: after a load that step begins again. All ranks must
        call it. With `checkpoint.async` it returns when the values are copied; a failure is raised at the next step,
        save or close.

        Raises CheckpointError on every rank if any fails (earlier checkpoints are intact), and ValueError between the
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
                f"save_checkpoint: expected a call between steps, found {self._steps.accumulated.done}; gradients are "
                "not saved, so call it after engine.step() has updated"
            )
        self._steps.refuse_more("engine.save_checkpoint()")  # what the step's last backward has updated already
        if any(forbids("checkpoint") for forbids in self._features.forbids_files):
            # A trial writes nothing, but the script goes on with a tag.
            return tag or f"global_step{self.global_step}"
        for flush in self._features.before_save:
            flush()
        with self._steps.apart(Activity.SAVING, Access.READS):
            self._archive.values.make_copies_exact()  # so that a continued training has the same bits
            state = {**self.client_state, **(client_state or {})}
            training = self._state.described()
            return self._archive.checkpoints.save(folder, tag, state, self.global_step, training, latest)

    @exclusive
    def load_checkpoint(self, folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
        """Continue from a checkpoint, whatever its number of ranks and ZeRO stage, and return its client state.

        tag: None for the latest. Values in `engine.client_state` are restored in place. A parameter gets the optimizer
        options of its saved group, except options whose value in the config has changed. With other ranks or axes
        the random generators are not restored, and the client state is that of rank 0.

        Raises NoCheckpointError without a checkpoint, and CheckpointError if a file is missing, truncated or changed,
        or the checkpoint is of another model.
        """
        self._steps.forget()
        with self._steps.apart(Activity.LOADING, Access.REPLACES):
            begin = self._steps.update.begin_load
            loaded = self._archive.checkpoints.load(folder, tag, self.client_state, self.lr_scheduler, begin)
            training, config, client_state = loaded
            self._state.restore(training, config)
        for feature in self._features.after_load:
            feature(self.global_step)
        self._state.restore_client_state(client_state)
        return client_state

    def close(self) -> None:
        """Remove the hooks, and leave the process group if an engine made it. No call is possible afterwards.

        Waits for a checkpoint that is being written, and for a background update; raises CheckpointError or
        OffloadError if these failed.
        """
        if not self._call_guard.is_over:
            for feature in self._features.before_call:
                feature("engine.close()", Access.CLOSES)
            with self._call_guard.of("engine.close()"):
                self._close()

    def _close(self) -> None:
        # On the way out `_closing` runs all its callbacks, even if the update or the wait raises.
        with self._closing:
            # Added last, so it runs first: a pending save needs all ranks and their connections.
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
            self._archive.checkpoints.wait_alone()  # other ranks may be lost: no collective
            self._closing.close()

    # -- calls between steps --------------------------------------------------------------------------------------

    @exclusive
    def offload_states(self, include: Collection[str] | None = None, pin_memory: bool = True) -> int:
        """Move states from the device to host memory until `reload_states`; return the freed bytes.

        include: of "optimizer" (states, master weights, averages), "gradients" (kept between steps) and "parameters"
        (this rank's shards, if the stage frees parameters after use); None: all that exist. States that are offloaded
        already stay. pin_memory: of the copies. All ranks must call it, between steps. Until `reload_states` a
        training call, a change and a save raise StateError; without "parameters" the model can run. Raises ValueError
        for other kinds, and OffloadError if the host lacks memory.
        """
        return self._features.get(OffloadedStates).offload(include, pin_memory)

    @exclusive
    def reload_states(self) -> None:
        """Move the states of `offload_states` back to the device, if there are any. Waits for the device.

        Raises torch's error if the device lacks memory; free some, and call it again.
        """
        self._features.get(OffloadedStates).reload()

    @exclusive
    def ema(self, decay: float = 0.999) -> None:
        """Keep an average from now on: each step that is not skipped computes decay x average + (1 - decay) x weight.

        The numbers are those of torch's AveragedModel with get_ema_multi_avg_fn(decay): the first step copies the
        weights. Master weights are averaged if they exist, in their dtype, and at least float32; buffers are not. Call
        it once, on all ranks, after `initialize`, and before `load_checkpoint` to continue saved averages. `memory()`
        counts the averages with the optimizer. Raises ValueError for a decay outside of [0, 1], and for a second call.
        """
        self._features.get(AveragedWeights).keep(decay)

    def ema_weights(self) -> AbstractContextManager[None]:
        """In this context the averages are the weights: for `eval_step`, forwards, `state_dict` and `export`.

        All ranks must enter and leave it. At the end every weight has its bits of before. Raises ValueError without
        `ema`. Calls inside it that would change the weights (`backward`, `step`, `gathered(modify=True)`,
        `load_weights`, ...) or save the averages as weights of the training (`save_checkpoint`, `close`) raise
        StateError.
        """
        return self._features.get(AveragedWeights).shown(self._call_guard, self._archive.swap)

    def profile(self, steps: int = 1) -> StepProfile:
        """Record the next `steps` steps: a trace, each collective, operations by module.

        They take several times as long. The result has `is_done` afterwards, `table()` and `save(folder)`. Raises
        ValueError during another profile.
        """
        return StepProfile(self._parts, self.global_step, steps)

    # -- pieces of the calls above --------------------------------------------------------------------------------

    def _check_trains(self, call: str) -> None:
        """Raise ValueError if the engine has no optimizer."""
        if not self.optimizer.param_groups:
            raise ValueError(
                f"{call}: expected an engine with an optimizer, found an engine without; put an optimizer into the "
                "config, or pass it to lowtide.initialize(..., optimizer=...). Without it engine(...) and "
                "engine.eval_step(batch) work"
            )

    def _register_groups(self, frozen: Frozen | None) -> None:
        """Make the archive and the gradients anew, for the present groups. frozen: of the last archive."""
        units, whole, features = self._runner.passes.units, self._runner.whole, self._features

        def note_exact() -> None:  # without self: hooks on the model reach it, and must not keep the engine alive
            for feature in features.after_refresh:
                feature()

        self._archive = self._parts.archive = Archive(
            self.config, self._mesh, self._module, units, self.optimizer, whole, frozen, note_exact
        )
        self._gradients = StepGradients(self.config, self._mesh, self._steps, self._archive.parameters)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do `engine.optimizer.add_param_group`."""
        with self._call_guard.of(ADDING):
            self._check_trains(ADDING)
            self._steps.check_between(ADDING)
            with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
                self._archive.checkpoints.wait()  # a pending save reads the old groups
                self._added_groups.add(param_group, self._state.learning_rates.check_takes)
                self._steps.register_groups()
                self._register_groups(self._archive.frozen)
                self._state.learning_rates.add(param_group)

    @property
    def _progress(self) -> Progress:
        return self._mesh.world.progress


def _what(call: str, safe: str, state: str | None) -> str:
    """Return the name of a call for users, in lowtide.deepspeed too."""
    values = "fp32_param" if state is None else "optimizer_state"
    return f"engine.{call}() (safe_{safe}_{values} in lowtide.deepspeed)"
