"""Check with the first batches that a split model computes the same as the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...model.recomputing import in_eval_mode
from ...offload import ActivationOffload, in_storages_of
from ...parallel.sequence_data import SequenceShard
from ...parallel.split_self_check import SplitSelfCheck
from ...zero.unit import Unit
from ..model.sequences import Sequences
from .features import StepFeature
from .parts import Parts


class SequenceCheck(StepFeature):
    """Checks that tokens of shared sequences interact in attention alone. See `Sequences.self_check`."""

    def __init__(self, sequences: Sequences, parts: Parts) -> None:
        self._sequences = sequences
        self._steps = parts.steps
        self._runner = parts.runner

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        sequences = parts.runner.model_call.sequences
        return None if sequences is None else cls(sequences, parts)

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        # A forward with batches that differ between stages would send messages that do not fit.
        if not self._steps.accumulated.is_void:
            self.before_evaluation(batches[0])

    def before_evaluation(self, batch: Any) -> None:
        runner = self._runner

        def ready(part: SequenceShard) -> SequenceShard:
            self._steps.begin_use()
            return part.changed(partial(runner.model_call.prepared, mark=self._steps.scale.mark_input))

        def loss(part: SequenceShard) -> Tensor | None:
            return runner.tried_loss(ready(part))

        tried = runner.tried_output
        outputs = None if tried is None else lambda part: tried(ready(part))
        self._sequences.self_check(batch, loss, outputs, runner.summed_over_stages)


class SplitCheck(StepFeature):
    """Checks in a forward of the first microbatch that split layers compute the same as whole layers. See
    `SplitSelfCheck`.

    All ranks check together, and raise ValueError together.
    """

    def __init__(self, trial: SplitSelfCheck, parts: Parts) -> None:
        self._trial = trial
        self._parts = parts

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        trial = parts.runner.model_call.splits
        return None if trial is None else cls(trial, parts)

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        if output is None or not torch.is_grad_enabled() or self._parts.steps.accumulated.is_void:
            return
        self._parts.steps.begin_use()
        sequences = self._parts.runner.model_call.sequences
        around_copy = nullcontext if sequences is None else sequences.around_copy
        # Eval mode: this additional forward must not count in running means.
        with in_eval_mode(self._parts.module), self._trial.compared(around_copy):
            output()
        self._judge()

    def around_forward(self) -> AbstractContextManager[object]:
        """Check during the forward of the first microbatch itself, if it cannot be made twice."""
        return self._compared_in_passing() if torch.is_grad_enabled() else nullcontext()

    @contextmanager
    def _compared_in_passing(self) -> Iterator[None]:
        with self._trial.compared_in_passing(in_eval_mode):
            yield
        self._judge()

    def _judge(self) -> None:
        """Raise ValueError if any rank found a difference. A collective."""
        mesh = self._parts.mesh
        wrong = [distance > 0 for distance in self._trial.distances.values()]
        sums = torch.tensor(wrong, dtype=torch.int64, device=mesh.world.device)
        self._trial.check(mesh.sum_small(sums, "the check of split layers").tolist())
        self._parts.steps.features.turn_off(self)  # all ranks at once, as they have the same sums


class SavedActivations(StepFeature):
    """Offloads the tensors that forwards of the whole model save for the backward. See `ActivationOffload`."""

    def __init__(self, saving: ActivationOffload, parts: Parts) -> None:
        self._saving = saving
        self._parts = parts

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return None if parts.activations is None else cls(parts.activations, parts)

    def around_forward(self) -> AbstractContextManager[object]:
        return self._saving

    def after_new_groups(self) -> None:
        # Else it would offload parameters that have new memory, and hold their old memory.
        self._saving.is_parameter_storage = is_kept_anyway(self._parts.module, self._parts.runner.passes.units)


def is_kept_anyway(module: nn.Module, units: Sequence[Unit]) -> Callable[[Tensor], bool]:
    """Return whether a tensor is in memory that the engine keeps anyway: to offload it would free nothing."""
    return in_storages_of([*(group.full for unit in units for group in unit.groups), *module.buffers()])
