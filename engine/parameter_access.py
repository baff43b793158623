"""What an engine shows of single parameters: values, optimizer states, gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..comm import Activity
from .archive.archive import Archive
from .step.features import Access
from .step.shown_gradients import ShownGradients
from .step.step_gradients import StepGradients
from .step.steps import Steps
from .step.turn import Turn, in_turn


class ParameterAccess:
    """Reads and sets what belongs to one parameter, by the parameter itself or by its name in the model.

    `state` is an optimizer state that has the shape of its parameter, such as "exp_avg" and "exp_avg_sq". Without
    it the master weights are meant: float32 where parameters are computed in half precision, else the parameter itself.
    All of it is in the master weights' dtype, also where states have 8 bits, and wherever it rests.
    """

    _turn: Turn
    _steps: Steps
    _archive: Archive
    _gradients: StepGradients
    _shown: ShownGradients

    @in_turn
    def full(self, param: nn.Parameter | str, state: str | None = None) -> Tensor:
        """All of a parameter's master weights, or of a state, as a new tensor of its shape on every rank.

        All ranks must call it. Raises ValueError for what is no parameter, and for a state that it does not have.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.parameters.full(param, state, _what("full", "get_full", state))

    @in_turn
    def set_full(self, param: nn.Parameter | str, value: Tensor, state: str | None = None) -> None:
        """Sets what `full` shows to rank 0's `value`, of the parameter's shape and any dtype.

        All ranks must call it. What is computed with follows on all ranks. Raises ValueError as `full`, and for another
        shape.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.set_full(param, value, state, _what("set_full", "set_full", state))

    @in_turn
    def local(self, param: nn.Parameter | str, state: str | None = None) -> Tensor:
        """As `full`, but only what lies in this rank's shard, (n,), in the order of the flattened parameter.

        Nothing is moved between ranks; only where updates run in the background (`overlap` "delayed") must all ranks
        call it. n is 0 where the parameter does not reach into this rank's shard.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            return self._archive.parameters.local(param, state, _what("local", "get_local", state))

    @in_turn
    def set_local(self, param: nn.Parameter | str, value: Tensor, state: str | None = None) -> None:
        """Sets what `local` shows to `value`, (n,).

        All ranks must call it, each with its own part; ranks that hold the same part (replicas) with equal values.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.set_local(param, value, state, _what("set_local", "set_local", state))

    @in_turn
    def reset_states(self, *params: nn.Parameter | str) -> None:
        """Forgets the optimizer's states of these parameters, and their steps: the next step is their first one.

        As where their entries of a torch optimizer's `state` are deleted: for restarts of some weights, as in ReLoRA.
        Weights, and learning rates, stay as they are. All ranks must call it with the same, between steps: StateError
        at any other time. Raises ValueError for what is not trained, and with 1-bit optimizers.
        """
        self._steps.check_between("engine.reset_states()")
        with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
            self._archive.parameters.reset_states(params, "engine.reset_states()")

    @in_turn
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

    @in_turn
    def set_gradient(self, param: nn.Parameter | str, value: Tensor | None, local: bool = False) -> None:
        """Sets what `gradient` shows: the norm of the step, its clipping and its update are of what was set.

        value: of the parameter's shape and any dtype, rank 0's; or with `local` this rank's part, (n,), ranks that hold
        the same part (replicas) with equal values; or None: the step leaves the parameter as it is, as torch does where
        `param.grad` is None. All ranks must call it, at the times of `gradient`, and before `clip_grad_norm_`:
        StateError at any other time. Raises ValueError for another shape, and for what is not trained.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            self._gradients.set_gradient(param, value, local)

    @in_turn
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

    @in_turn
    def clip_grad_value_(self, clip_value: float) -> None:
        """Makes each element of the gradients of the coming step at most `clip_value`, and at least -clip_value.

        As torch.nn.utils.clip_grad_value_, of the mean over microbatches and ranks. All ranks must call it, between the
        backward of the last microbatch and `engine.step()`, and before `clip_grad_norm_`: StateError at any other time,
        and with `update_in_backward`.
        """
        with self._steps.apart(Activity.WEIGHTS, Access.NOTHING):
            self._gradients.clip_values(float(clip_value))


def _what(call: str, safe: str, state: str | None) -> str:
    """How users read a call, in lowtide.deepspeed too."""
    values = "fp32_param" if state is None else "optimizer_state"
    return f"engine.{call}() (safe_{safe}_{values} in lowtide.deepspeed)"
