"""The engine: a model, its sharded optimizer, and the steps of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..comm import Mesh, Pending
from ..zero.exact_sum import NUM_LIMBS, from_limbs, to_limbs
from ..zero.hooks import UnitHooks
from ..zero.loss_scale import LossScaler
from ..zero.optimizer import ShardedOptimizer, ShardState
from ..zero.sequence import UnitSequence
from .batch import call, loss_of, microbatches, prepared
from .config import Config
from .errors import NonFiniteGradientError
from .full_values import FullValues
from .guard import ModelGuard
from .log import StepLog
from .memory import ModelStateBytes, measure

Schedule = Callable[[float, int], float]
"""(learning rate of a parameter group, optimizer steps taken so far) -> the group's learning rate of the next step."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: Tensor  # (), mean over the microbatches of all ranks; float32, or float64 where the model's loss is
    grad_norm: Tensor  # (), L2 norm over all ranks, before clipping; NaN or inf where the step was skipped
    lr: float  # the learning rate that was used
    loss_scale: float  # by which the loss had been multiplied
    skipped: bool  # float16 gradients overflowed: nothing was updated


@dataclass(frozen=True)
class Parts:
    """What `initialize` has made of a model and a config."""

    config: Config
    mesh: Mesh
    module: nn.Module
    sequence: UnitSequence
    hooks: UnitHooks
    optimizer: ShardedOptimizer
    loss_scaler: LossScaler
    compute_dtype: torch.dtype | None
    casts_inputs: bool
    loss_fn: Callable[[Any, Any], Tensor] | None
    schedule: Schedule | None
    lr_scheduler: Any
    rows_per_microbatch: int | None


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
        self.lr_scheduler = parts.lr_scheduler
        self.global_step = 0
        self._is_closed = False
        self._parts = parts
        self._mesh = parts.mesh
        self._sequence = parts.sequence
        self._scaler = parts.loss_scaler
        self._accumulation = parts.config.gradient_accumulation_steps or 1
        self._num_microbatches = 0
        self._losses: list[Tensor] = []
        self._result_dtype = torch.float32
        self._guard = ModelGuard(parts.module, parts.sequence.units, parts.mesh.shard.route.copies_are_shared)
        self._values = FullValues(parts.module, parts.sequence.units, parts.optimizer, parts.mesh)
        self._log = StepLog(parts.config.steps_per_print if self.rank == 0 else 0)
        self._last = StepResult(torch.zeros(()), torch.zeros(()), self.lr, self._scaler.scale, False)
        self._base_lrs = [float(group["lr"]) for group in parts.optimizer.param_groups]
        self._apply_schedule()
        self._prepare_update_in_backward()

    # -- who and where --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._mesh.world.rank

    @property
    def world_size(self) -> int:
        return self._mesh.world.size

    @property
    def device(self) -> torch.device:
        return self._mesh.world.device

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.optimizer.lr

    def memory(self) -> ModelStateBytes:
        """Bytes of parameters, gradients and optimizer states on this rank, as they are now."""
        return measure(self._sequence.units, self.optimizer, self._mesh)

    # -- training -------------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's share of a global batch, or on an iterator of microbatches.

        Raises NonFiniteGradientError where a gradient is not finite (float16: the step is skipped instead). After an
        error of all ranks alike the next call is a step of its own: no gradient of the failed one is left.
        """
        try:
            for microbatch in microbatches(batch, self._accumulation, self._parts.rows_per_microbatch):
                ready = self._prepare(microbatch)
                self._guard.check()
                output = call(self.module, ready)
                self.backward(loss_of(output, ready, self._parts.loss_fn))
        except BaseException:
            self._forget_gradients()
            raise
        return self.step()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with inputs on the device and in the compute dtype."""
        self._guard.check()
        return self.module(*self._prepare(args), **self._prepare(kwargs))

    def backward(self, loss: Tensor) -> None:
        """Computes gradients of loss / gradient_accumulation_steps and reduces them as the ZeRO stage says."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"backward: expected a loss with one element that requires a gradient, found {_describe(loss)}; "
                "was it computed under torch.no_grad(), or detached?"
            )
        boundary = self._num_microbatches % self._accumulation == self._accumulation - 1
        if boundary and self._updates_in_backward:
            self.optimizer.begin_step()
        self._sequence.begin_backward(boundary)
        try:
            (loss * (self._scaler.scale * self._predivide / self._accumulation)).backward()  # type: ignore[no-untyped-call]
            self._sequence.end_backward()
        except BaseException as error:
            self._sequence.abort(error)
            raise
        self._losses.append(loss.detach().double())
        self._result_dtype = torch.promote_types(loss.dtype, torch.float32)
        self._num_microbatches += 1

    def step(self) -> StepResult:
        """Updates the parameters at the accumulation boundary; before it, only returns the last result."""
        if self._num_microbatches % self._accumulation or not self._losses:
            return self._last
        loss, square_norm, num_bad = self._global_sums()
        scale, lr = self._scaler.scale, self.lr
        factor = 1.0 / (self.world_size * scale * self._predivide)
        grad_norm = math.sqrt(square_norm) * factor if not num_bad else math.nan
        skipped = bool(num_bad)
        if skipped and not self._is_fp16:
            try:
                self._raise_non_finite()
            finally:
                self._forget_gradients()
        if not skipped:
            clip = self.config.gradient_clipping
            if clip and grad_norm > clip:
                factor *= clip / (grad_norm + 1e-6)
            self._update(factor)
            self._advance_schedule()
        self._forget_gradients()
        self._scaler.update(skipped)
        self.global_step += 1
        self._last = StepResult(
            torch.tensor(loss, dtype=self._result_dtype),
            torch.tensor(grad_norm, dtype=self._result_dtype),
            lr,
            scale,
            skipped,
        )
        self._log.after_step(self.global_step, self._last, self.config.train_batch_size or 0)
        return self._last

    @torch.no_grad()
    def eval_step(self, batch: Any) -> Tensor:
        """The loss of a batch of any size, averaged over the ranks, without gradients and in eval mode."""
        was_training = self.module.training
        self.module.eval()
        try:
            ready = self._prepare(batch)
            loss = loss_of(call(self.module, ready), ready, self._parts.loss_fn)
        finally:
            self.module.train(was_training)
        total = self._mesh.sum_small(_limbs_of(loss.double()), "the mean of the loss")
        return torch.tensor(from_limbs(total) / self.world_size, dtype=torch.promote_types(loss.dtype, torch.float32))

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
        """
        with self._values.gathered(params, modify):
            yield
        self._guard.remember()

    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers under the model's own names, on the CPU, on rank 0; empty on other ranks.

        All ranks must call it. Gathered and copied unit by unit.
        """
        return self._values.state_dict()

    def close(self) -> None:
        """Takes the hooks off and leaves the process group, where an engine made it. The engine is of no use then."""
        if self._is_closed:
            return
        self._is_closed = True
        self._parts.hooks.remove()
        self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    @property
    def _is_fp16(self) -> bool:
        return self.config.fp16.enabled

    @property
    def _updates_in_backward(self) -> bool:
        return self.config.zero_optimization.update_in_backward

    @property
    def _predivide(self) -> float:
        """The factor by which gradients are made smaller before they are summed over ranks."""
        factor = self.config.gradient_predivide_factor
        if self.config.prescale_gradients or (not self._is_fp16 and factor == 1.0):
            # The mean over ranks costs no pass of its own then. Float16 keeps the digits that the loss scale gave it.
            return 1.0 / self.world_size
        return 1.0 / factor

    def _prepare(self, batch: Any) -> Any:
        dtype = self._parts.compute_dtype if self._parts.casts_inputs else None
        return prepared(batch, self.device, dtype)

    def _prepare_update_in_backward(self) -> None:
        if not self._updates_in_backward:
            return
        factor = 1.0 / (self.world_size * self._predivide)
        for shard in self.optimizer.shards:

            def update(shard: Any = shard) -> None:
                if shard.gradient.non_finite is None:
                    self.optimizer.update(shard, factor)
                shard.gradient.drop_shard()

            shard.gradient.on_final = update

    def _update(self, factor: float) -> None:
        pending: list[Pending] = []
        if self._updates_in_backward:
            pending.extend(self._send(shard) for shard in self.optimizer.shards)
        else:
            self.optimizer.step(gradient_scale=factor, on_updated=lambda shard: pending.append(self._send(shard)))
        for one in pending:
            one.wait()
        self._mesh.fence(f"the update of step {self.global_step}")

    def _send(self, shard: ShardState) -> Pending:
        """Starts to bring an updated shard into the full parameters of all ranks, where those are kept."""
        return Pending() if shard.group.frees_memory else shard.group.refresh()

    def _forget_gradients(self) -> None:
        """The next microbatch is the first of its step."""
        for unit in self._sequence.units:
            for gradient in unit.gradients:
                gradient.reset()
                for param in gradient.group.params:
                    param.grad = None
        self._losses.clear()
        self._num_microbatches = 0

    def _global_sums(self) -> tuple[float, float, int]:
        """(mean loss, sum of squared gradients, number of groups with a non-finite gradient) over all ranks."""
        squares = torch.zeros(NUM_LIMBS, dtype=torch.int64)
        num_bad = 0
        for unit in self._sequence.units:
            for gradient in unit.gradients:
                squares += gradient.square_limbs
                num_bad += gradient.non_finite is not None
        mean = torch.stack(self._losses).mean()
        is_finite = bool(torch.isfinite(mean))
        loss = _limbs_of(mean if is_finite else torch.zeros_like(mean))
        counts = torch.tensor([num_bad, not is_finite], dtype=torch.int64)
        packed = torch.cat([squares, loss.cpu(), counts]).to(self.device)
        total = self._mesh.sum_small(packed, f"the norm of step {self.global_step}").cpu()
        mean_loss = from_limbs(total[NUM_LIMBS : 2 * NUM_LIMBS]) / self.world_size if not total[-1] else math.nan
        return mean_loss, from_limbs(total[:NUM_LIMBS]), int(total[-2])

    def _raise_non_finite(self) -> None:
        own = [g.non_finite for unit in self._sequence.units for g in unit.gradients if g.non_finite is not None]
        found = [item for items in self._mesh.world.gather_objects(own) for item in items]
        first = next((item for item in found if item.rank is not None), found[0])
        producer = f"rank {first.rank}" if first.rank is not None else "the sum over ranks"
        outcome = (
            "The parameters whose gradients are finite were updated already (update_in_backward)."
            if self._updates_in_backward
            else "No parameter was updated."
        )
        others = sorted({item.parameter for item in found} - {first.parameter})
        raise NonFiniteGradientError(
            f"step {self.global_step}: expected finite gradients, found a NaN or infinite value in the gradient of "
            f"'{first.parameter}' on {producer}"
            + (f" (also in {len(others)} more parameters)" if others else "")
            + f". {outcome} Look at that rank's batch and at the learning rate; "
            "torch.autograd.set_detect_anomaly(True) finds the operation."
        )

    def _apply_schedule(self) -> None:
        if self._parts.schedule is not None:
            for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = self._parts.schedule(base_lr, self.optimizer.num_steps)

    def _advance_schedule(self) -> None:
        self._apply_schedule()
        if self.lr_scheduler is not None:
            bound = getattr(self.lr_scheduler, "optimizer", None)
            if isinstance(bound, torch.optim.Optimizer):
                # Its own `step` is never called; torch's scheduler warns without this. Test: test_own_optimizer.py.
                bound._opt_called = True  # type: ignore[attr-defined]
            self.lr_scheduler.step()


def _limbs_of(value: Tensor) -> Tensor:
    """A finite float64 scalar of either sign as limbs."""
    limbs = to_limbs(value.abs().reshape(1))
    return limbs if value >= 0 else -limbs


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))}"
    return f"{type(value).__name__}"
