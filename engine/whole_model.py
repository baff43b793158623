"""The driver without a pipeline: each rank has the whole model, and hooks on it say which units are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Activity, Mesh
from ..model.ledger import Ledger
from ..zero.hooks import UnitHooks
from ..zero.sequence import UnitSequence
from ..zero.unit import Unit
from . import backward_starts
from .archive.named_state import Whole
from .batch import call, call_for_loss, forward, loss_of
from .join import Call
from .same_batch import SameBatch
from .sequences import Sequences, weighted_loss
from .steps import Steps
from .turn import Turn
from .unasked import Unasked, check_loss


class WholeModel:
    """See `Driver`. A microbatch goes forward and backward before the next one."""

    def __init__(
        self,
        module: nn.Module,
        passes: UnitSequence,
        hooks: UnitHooks,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        saving: AbstractContextManager[object],
        mesh: Mesh,
        ledger: Ledger,
        sequences: Sequences | None = None,
    ) -> None:
        """passes: told of all uses by the hooks. saving: entered around forwards; what they save for the backward.
        ledger: of what hears of backwards. sequences: that other ranks have parts of."""
        self.passes = passes
        self.whole = Whole.of(module, passes.units)
        self._module = module
        self._hooks = hooks
        self._loss_fn = loss_fn
        self.saving = saving
        self._progress = mesh.world.progress
        self._same = SameBatch(mesh)
        self._ledger = ledger
        self._sequences = sequences

    def train(self, steps: Steps, microbatches: Iterator[Any]) -> None:
        for microbatch in microbatches:
            self._check_same(steps, microbatch)
            own, factor = self._part(steps, microbatch)
            ready = steps.prepared(own)
            steps.begin_forward()
            with self.saving:
                output = steps.scale.mark_output(call_for_loss(self._module, ready, self._loss_fn))
                loss = weighted_loss(loss_of(output, ready, self._loss_fn), factor)
            self.backward(steps, loss)

    def _check_same(self, steps: Steps, batch: Any) -> None:
        differs = self._same.check(batch)
        if differs is not None:
            steps.doubt(differs, self._same.read)

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self._check_same(steps, (args, kwargs))
        factor = None
        if self._sequences is not None:
            self._try(self._sequences, steps, kwargs)
            kwargs, factor = self._sequences.part_of_call(args, kwargs)
        steps.begin_forward()
        with self.saving, self._progress.forward(steps.num_microbatches, torch.is_grad_enabled()):
            output = steps.scale.mark_output(forward(self._module, steps.prepared(args), steps.prepared(kwargs)))
            return output if factor is None else weighted_loss(loss_of(output, kwargs, None), factor)

    def backward(self, steps: Steps, loss: Tensor) -> None:
        check_loss(loss, "backward")
        self._progress.enter(Activity.BACKWARD, steps.num_microbatches)
        steps.backward(steps.scale.apply(loss).backward)
        steps.losses.append(loss.detach())

    def scale(self, steps: Steps, loss: Tensor) -> Tensor:
        check_loss(loss, "scale")
        scaled = steps.scale.apply(loss)
        return self._unasked.known(scaled, loss.detach())

    def take_up(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._hooks.hook_params(unit)

    def listen(self, steps: Steps, turn: Turn) -> None:
        self._unasked = Unasked(self.passes, steps, turn, self._progress)
        self.passes.listen(self._unasked)
        self._ledger.callback(backward_starts.listen(steps.scale.begin))

    def take_part(self, steps: Steps, call: Call) -> None:
        if call in (Call.BACKWARD, Call.LAST_BACKWARD):
            with steps.accumulate(last=call is Call.LAST_BACKWARD):
                steps.backward(lambda: None)  # all units count as unused
            return
        with torch.set_grad_enabled(call is Call.FORWARD):
            self.passes.begin_forward()
            self.passes.end_forward(keeps_graph=call is Call.FORWARD)

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        steps.begin_use()
        own, factor = self._part(steps, batch)
        ready = steps.prepared(own)
        return [weighted_loss(loss_of(call(self._module, ready), ready, self._loss_fn), factor)]

    def _part(self, steps: Steps, batch: Any) -> tuple[Any, float | None]:
        if self._sequences is None:
            return batch, None
        self._try(self._sequences, steps, batch)
        return self._sequences.part(batch)

    def _try(self, sequences: Sequences, steps: Steps, batch: Any) -> None:
        def loss(inputs: Any) -> Tensor:
            ready = steps.prepared(inputs)
            return loss_of(call(self._module, ready), ready, self._loss_fn)

        if not sequences.is_tried:
            steps.begin_use()
            sequences.try_once(batch, loss)
