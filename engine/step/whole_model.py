"""The driver without a pipeline: each rank has the whole model, and hooks on it say which units are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Activity, Mesh
from ...model.ledger import Ledger
from ...zero.hooks import UnitHooks
from ...zero.sequence import UnitSequence
from ...zero.unit import Unit
from ..archive.named_state import UnsplitModel
from . import backward_starts
from .batch import call, forward
from .join import Call
from .model_call import ModelCall
from .same_batch import SameBatch
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
        model_call: ModelCall,
        saving: AbstractContextManager[object],
        mesh: Mesh,
        ledger: Ledger,
    ) -> None:
        """passes: told of all uses by the hooks. saving: entered around forwards; what they save for the backward.
        ledger: of what hears of backwards."""
        self.passes = passes
        self.whole = UnsplitModel.of(module, passes.units)
        self._module = module
        self._hooks = hooks
        self._call = model_call
        self.saving = saving
        self._progress = mesh.world.progress
        self._same = SameBatch(mesh, module)
        self._ledger = ledger

    def train(self, steps: Steps, microbatches: Iterator[Any]) -> None:
        for microbatch in microbatches:
            for feature in steps.features.before_forward:
                feature([microbatch])
            self._check_same(steps, microbatch)
            self._try(steps, microbatch)
            ready = self._call.ready(steps, microbatch)
            self._call.compare_once(steps, self._module, lambda: self._call.output(self._module, ready))  # noqa: B023
            steps.begin_forward()
            with self.passes.failing_forward(), self.saving:
                loss = self._loss(steps, ready)
            self.backward(steps, loss)

    def _loss(self, steps: Steps, ready: Any) -> Tensor:
        """Alone: the logits of an output would take memory for the whole backward."""
        return self._call.loss(steps.scale.mark_output(self._call.output(self._module, ready)), ready)

    def _check_same(self, steps: Steps, batch: Any) -> None:
        differs = self._same.check(batch)
        if differs is not None:
            steps.so_far.note_doubt(differs, self._same.read)

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for feature in steps.features.before_forward:
            feature([(args, kwargs)])
        if torch.is_grad_enabled():
            self._check_same(steps, (args, kwargs))
        self._try(steps, kwargs)
        ready = self._call.ready_by_hand(steps, args, kwargs)

        def output() -> Any:
            return self._call.run(ready, lambda: forward(self._module, steps.inputs.prepared(args), ready))

        self._call.compare_once(steps, self._module, output)
        steps.begin_forward()
        with self._forward(steps):
            return self._call.weighted(steps.scale.mark_output(output()), ready)

    @contextmanager
    def _forward(self, steps: Steps) -> Iterator[None]:
        progress = self._progress.forward(steps.so_far.num_microbatches, torch.is_grad_enabled())
        with self.passes.failing_forward(), self.saving, progress:
            yield

    def run(self, steps: Steps, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for feature in steps.features.before_forward:
            feature([(args, kwargs)])
        if torch.is_grad_enabled():
            self._check_same(steps, (args, kwargs))
        steps.begin_forward()
        with self._forward(steps):
            with self._call.compared_in_passing():
                output = self._hooks.around(partial(function, *args, **kwargs))
            return steps.scale.mark_output(output)

    def backward(self, steps: Steps, loss: Tensor) -> None:
        check_loss(loss, "backward")
        self._progress.enter(Activity.BACKWARD, steps.so_far.num_microbatches)
        steps.backward(steps.scale.apply(loss).backward)
        steps.so_far.losses.append(loss.detach())

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
            with steps.so_far.accumulate(last=call is Call.LAST_BACKWARD):
                steps.backward(lambda: None)  # all units count as unused
            return
        with torch.set_grad_enabled(call is Call.FORWARD):
            self.passes.begin_forward()
            self.passes.end_forward(keeps_graph=call is Call.FORWARD)

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        steps.begin_use()
        self._try(steps, batch)
        ready = self._call.ready(steps, batch)
        with self.passes.failing_forward():
            return [self._call.loss(self._call.run(ready, lambda: call(self._module, ready)), ready)]

    def own(self, x: Tensor, fill: float) -> Tensor:
        return self._call.own(x, fill)

    def whole_output(self, output: Any, tokens: int) -> Any:
        return self._call.whole_output(output, tokens)

    def _try(self, steps: Steps, batch: Any) -> None:
        def output(ready: Any) -> Any:
            return self._call.output(self._module, ready)

        self._call.try_once(steps, batch, lambda ready: self._call.loss(output(ready), ready), output)
