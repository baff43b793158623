"""Show, set and clip the gradients of a step between its backwards and its update."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...comm import Mesh
from ...zero.sequence import StateError
from ..archive.parameter_values import ParameterValues
from ..blueprint.blueprint import Timing
from ..config.config import Config
from .gradient_placeholders import GradientPlaceholders
from .join import Call
from .step_sums import Clipping, SummedStep, sum_step
from .steps import Steps


class StepGradients:
    """Access to the reduced gradients of the coming step. Each method is a collective, except for a local gradient.

        backward ... backward | here | step

    `gradient` may be called after any of the backwards.
    """

    def __init__(self, config: Config, mesh: Mesh, steps: Steps, values: ParameterValues) -> None:
        self._config = config
        self._mesh = mesh
        self._steps = steps
        self._shown = steps.features.get(GradientPlaceholders)
        self._values = values

    def gradient(self, param: nn.Parameter | str, is_local: bool) -> Tensor | None:
        """See `Engine.gradient`."""
        what = f"engine.gradient() (safe_get_{'local' if is_local else 'full'}_grad in lowtide.deepspeed)"
        steps = self._steps
        is_complete = steps.accumulated.is_complete
        if not steps.accumulated.num_microbatches:
            raise StateError(
                f"{what}: expected a backward since the last step, found {steps.accumulated.done}; call it between a "
                "backward and engine.step()"
            )
        if is_complete:
            self._check_is_complete(what)
        else:
            self._shown.show_cleared_so_far(what)
        self._check_is_held(what, "each gradient is used and dropped as it arrives; a hook on the parameter sees it")
        if not is_local:
            steps.await_others()
        return self._values.gradient(param, steps.grad_scale, is_local, what, is_complete=is_complete)

    def set_gradient(self, param: nn.Parameter | str, value: Tensor | None, is_local: bool) -> None:
        """See `Engine.set_gradient`."""
        what = f"engine.set_gradient() (safe_set_{'local' if is_local else 'full'}_grad in lowtide.deepspeed)"
        self._prepare_change(what)
        self._values.set_gradient(param, value, self._steps.grad_scale, is_local, what)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """See `Engine.clip_grad_norm_`."""
        what = "engine.clip_grad_norm_()"
        max_norm, norm_type = float(max_norm), float(norm_type)
        self._check_is_complete(what)
        self._check_can_clip(what, max_norm, norm_type)
        with self._steps.join.together(Call.CLIPPING) as num_ranks:
            # Ranks without data do not know the arguments. They receive them in `clip_without_data`.
            if num_ranks < self._mesh.world.size:
                self._mesh.world.gather_objects((max_norm, norm_type, error_if_nonfinite))
            return self._clip(max_norm, norm_type, error_if_nonfinite)

    def clip_values(self, clip_value: float) -> None:
        """See `Engine.clip_grad_value_`."""
        what = "engine.clip_grad_value_()"
        if not clip_value >= 0:  # and not `<`, which is False for NaN too
            raise ValueError(f"{what}: expected a clip_value of 0 or more, found {clip_value:g}")
        self._prepare_change(what)
        for gradient in self._steps.gradients:
            gradient.clamp(clip_value / self._steps.grad_scale)

    def clip_without_data(self) -> None:
        """Take part in the `clip` of ranks with data, under `engine.join`."""
        arguments = next(given for given in self._mesh.world.gather_objects(None) if given is not None)
        self._clip(*arguments)

    # -- pieces of the calls above --------------------------------------------------------------------------------

    def _clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        clipping, earlier = Clipping(max_norm, is_by_hand=True), self._steps.accumulated.clipping_by_hand
        # Without a wait for the device, since `SummedStep.factor_and_skip` computes the factor on it.
        if norm_type == 2.0 and not error_if_nonfinite and earlier is None and self._mesh.world.device.type != "cpu":
            norm_there = self._norm_on_device()
            self._clip_by(clipping)
            return norm_there
        clipped = 1.0 if earlier is None else earlier.factor(self._norm(2.0))  # by earlier calls in this step
        norm = self._norm(norm_type) * clipped
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"engine.clip_grad_norm_(): expected a finite total norm, found {norm}: a gradient is not finite. With "
                "error_if_nonfinite=False engine.step() names the parameter, or in float16 skips the step"
            )
        # Then the sum of the step has this same norm, and the device computes the factor. Else the factor is fixed now.
        keeps_limit = norm_type == 2.0 and earlier is None
        self._clip_by(clipping if keeps_limit else Clipping(fixed=clipped * clipping.factor(norm)))
        return torch.tensor(norm, dtype=self._norm_dtype, device=self._mesh.world.device)

    def _clip_by(self, clipping: Clipping) -> None:
        if not self._config.gradient_clipping:  # else the step clips to the same norm anyway
            self._steps.accumulated.clipping_by_hand = clipping

    def _norm_on_device(self) -> Tensor:
        """Return the L2 norm, (), without waiting for the device."""
        steps = self._steps
        norm = self._summed().norm() * (steps.grad_scale * steps.norm_factor)
        return norm.to(self._norm_dtype)

    @property
    def _norm_dtype(self) -> torch.dtype:
        """Return the dtype of norms for callers."""
        dtypes = {loss.dtype for loss in self._steps.accumulated.losses}
        dtypes |= {gradient.accumulation_dtype for gradient in self._steps.gradients}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def _summed(self) -> SummedStep:
        steps = self._steps
        steps.await_others()  # forwards without gradients may follow the last backward
        return sum_step(
            self._mesh, steps.gradients, steps.accumulated.losses, (), "the norm for engine.clip_grad_norm_"
        )

    def _norm(self, norm_type: float) -> float:
        """Return the norm of the gradients of all ranks. A collective."""
        gradients, sums = self._steps.gradients, self._summed().read()
        if sums.num_bad:
            return math.nan
        # Squares were counted as reductions ended. The largest element was not, so the shards are read again.
        if norm_type == 2.0:
            return math.sqrt(sums.square_norm) * self._steps.grad_scale * self._steps.norm_factor
        for gradient in gradients:
            gradient.arrive()
        # torch has no largest element of a group whose parameters have no elements.
        shards = [one.shard for one in gradients if one.shard is not None and one.shard.numel()]
        largest = max((float(torch.linalg.vector_norm(shard, math.inf)) for shard in shards), default=0.0)
        return float(max(self._mesh.world.gather_objects(largest))) * self._steps.grad_scale

    def _check_is_complete(self, what: str) -> None:
        """Raise StateError before the last backward of a step. Also notice gradients that the caller has cleared."""
        steps = self._steps
        if not steps.accumulated.is_complete:
            raise StateError(
                f"{what}: expected the gradients of a whole step, found {steps.accumulated.done}; call it between the "
                "last backward and engine.step()"
            )
        self._shown.take_cleared()

    def _prepare_change(self, what: str) -> None:
        """Raise StateError if gradients must not change now. Roll back a speculative update with those of before."""
        self._check_is_complete(what)
        self._check_is_held(
            what, "each gradient is used and dropped as it arrives; a hook on the parameter may change it"
        )
        if self._steps.accumulated.clipping_by_hand is not None:
            raise StateError(
                f"{what}: expected a call before engine.clip_grad_norm_(), found it after that: the norm is of the "
                "gradients before; change all gradients first, then clip"
            )
        self._steps.roll_back()

    def _check_can_clip(self, what: str, max_norm: float, norm_type: float) -> None:
        if norm_type not in (2.0, math.inf):
            raise ValueError(f"{what}: expected a norm_type of 2 or inf, found {norm_type:g}")
        if not max_norm >= 0:  # and not `<`, which is False for NaN too
            raise ValueError(f"{what}: expected a max_norm of 0 or more, found {max_norm:g}")
        clips = self._config.gradient_clipping
        if clips and max_norm != math.inf and (max_norm != clips or norm_type != 2.0):
            raise ValueError(
                f"{what}: expected a single clip norm, found max_norm {max_norm:g} (norm_type {norm_type:g}) and "
                f"gradient_clipping {clips:g} in the config, which clips each step: remove either. max_norm=inf only "
                "returns the norm"
            )
        if max_norm != math.inf or norm_type != 2.0:
            self._check_is_held(what, "parameters are updated already; max_norm=inf only returns the norm")

    def _check_is_held(self, what: str, why: str) -> None:
        if self._steps.update.timing is Timing.IN_BACKWARD:
            raise StateError(f"{what}: expected update_in_backward false in zero_optimization, found it true: {why}")
