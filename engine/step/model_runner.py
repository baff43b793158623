"""The runner without a pipeline: each rank has the whole model, and hooks on it report the uses of units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Activity, Mesh, Progress
from ...model.patches import ModelPatches
from ...zero.autograd import current_graph_task, forget_accumulators
from ...zero.hooks import UnitHooks
from ...zero.sequence import StateError, UnitSequence
from ...zero.unit import Unit
from ..archive.named_state import UnsplitModel
from .batch import ModelCall, call, forward
from .call_guard import CallGuard
from .gradient_placeholders import GradientPlaceholders
from .gradient_scale import on_backward_start
from .join import Call
from .steps import Steps


class ImplicitBackward:
    """Makes each `loss.backward()` do the same as `engine.backward`. See `UnitSequence.set_listeners`.

    It holds the engine's turn until autograd has ended.
    """

    def __init__(self, passes: UnitSequence, steps: Steps, call_guard: CallGuard, progress: Progress) -> None:
        self._passes = passes
        self._steps = steps
        self._call_guard = call_guard
        self._progress = progress
        self._shown = steps.features.get(GradientPlaceholders)
        self._losses: dict[int, Tensor] = {}  # by autograd's number of the backward

    def known(self, scaled: Tensor, loss: Tensor) -> Tensor:
        """Return `scaled`, (). When its backward begins, `loss` is known as the loss of that backward."""

        def hook(gradient: Tensor) -> None:
            self._losses[current_graph_task()] = loss

        # A view: if the seed is 1, `scaled` is the caller's loss, whose other uses must not run the hook.
        own = scaled.view_as(scaled)
        own.register_hook(hook)  # type: ignore[no-untyped-call]
        return own

    def begin(self, arrived: nn.Parameter | None) -> None:
        # Until autograd calls `end`: a user's code in between is inside of a call of the engine.
        self._call_guard.begin("loss.backward()", self._is_lost)
        try:
            self._progress.enter(Activity.BACKWARD, self._steps.accumulated.num_microbatches)
            # Autograd may have filled a `grad` before it reached a unit. `begin_backward` would take it for a gradient
            # that the caller has put in the place of a placeholder.
            with self._shown.final.set_aside(arrived):
                self._steps.begin_backward()
        except BaseException:
            self._call_guard.end()
            raise

    def end(self) -> None:
        try:
            try:
                self._steps.scale.check_applied()
            except StateError as error:
                self._steps.abort_backward(error)
                raise
            self._steps.end_backward()
            self._shown.put()
            self._steps.accumulated.note_loss(self._losses.get(current_graph_task()))
        finally:
            self._losses.clear()
            self._call_guard.end()

    def abort(self) -> None:
        # First, so that the turn is free even if the abort raises.
        self._call_guard.end()
        # The error itself has gone to the user from `loss.backward()`, past the engine.
        self._steps.abort_backward(StateError("loss.backward() was ended by an error"))

    def _is_lost(self) -> bool:
        """Return True if autograd ended without calling `end`. The turn is given back then."""
        # Autograd calls nothing back after an error: see [Note: what autograd runs] in `zero/sequence.py`.
        if not self._passes.has_lost_backward():
            return False
        self.abort()
        return True


def check_loss(loss: object, call: str, error: type[ValueError] = ValueError) -> None:
    """Raise `error` if no backward can begin with this value."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise error(
            f"{call}: expected a loss with a single element that requires a gradient, found {_describe(loss)}; "
            "was it computed under torch.no_grad(), or detached?"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))}"
    return f"{type(value).__name__}"


class ModelRunner:
    """Runs forward and backward of a microbatch, then the next microbatch. See `Runner`."""

    def __init__(
        self,
        module: nn.Module,
        passes: UnitSequence,
        hooks: UnitHooks,
        model_call: ModelCall,
        mesh: Mesh,
        patches: ModelPatches,
    ) -> None:
        """passes: the hooks report all uses to it. patches: undoes the listening to backwards when the engine
        closes."""
        self.passes = passes
        self.whole = UnsplitModel.of(module, passes.units)
        self._module = module
        self._hooks = hooks
        self.model_call = model_call
        self._device = mesh.world.device
        self._gradient_stream: int | None = None  # id of the stream on which autograd accumulates; None: not asked
        self._progress = mesh.world.progress
        self._patches = patches

    def train(self, steps: Steps, batch: Any) -> None:
        for microbatch in self.model_call.microbatches_of(batch, steps.accumulated.accumulation):
            steps.begin_forward([microbatch], partial(self._output, steps, microbatch))
            ready = self.model_call.ready(microbatch, steps.scale.mark_input)
            with self.passes.failing_forward(), steps.features.around():
                output = steps.scale.mark_output(self.model_call.output(self._module, ready))
                loss = self.model_call.loss(output, ready)
                del output  # else its logits take memory for the whole backward
            self.backward(steps, loss)

    def _output(self, steps: Steps, microbatch: Any) -> Any:
        return self.model_call.output(self._module, self.model_call.ready(microbatch, steps.scale.mark_input))

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def output() -> Any:
            ready = self.model_call.ready_by_hand(args, kwargs, steps.scale.mark_input)
            # Positional inputs are prepared apart: ranks that share sequences need the names of inputs, and have none
            # of these.
            own = self.model_call.prepared(args, steps.scale.mark_input)
            return self.model_call.run(ready, lambda: forward(self._module, own, ready)), ready

        steps.begin_forward([(args, kwargs) if args else kwargs], output)
        with self._forward(steps):
            found, ready = output()
            return self.model_call.weighted(steps.scale.mark_output(found), ready)

    @contextmanager
    def _forward(self, steps: Steps) -> Iterator[None]:
        progress = self._progress.forward(steps.accumulated.num_microbatches, torch.is_grad_enabled())
        with self.passes.failing_forward(), progress, steps.features.around():
            yield

    def run(self, steps: Steps, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        steps.begin_forward([(args, kwargs)], None)
        with self._forward(steps):
            return steps.scale.mark_output(self._hooks.around(partial(function, *args, **kwargs)))

    def backward(self, steps: Steps, loss: Tensor) -> None:
        check_loss(loss, "backward")
        self._progress.enter(Activity.BACKWARD, steps.accumulated.num_microbatches)
        steps.backward(steps.scale.apply(loss).backward)
        steps.accumulated.losses.append(loss.detach())

    def scale(self, steps: Steps, loss: Tensor) -> Tensor:
        check_loss(loss, "scale")
        scaled = steps.scale.apply(loss)
        return self._implicit.known(scaled, loss.detach())

    def register_groups(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._hooks.hook_params(unit)

    def watch_backwards(self, steps: Steps, call_guard: CallGuard) -> None:
        self._implicit = ImplicitBackward(self.passes, steps, call_guard, self._progress)
        implicit = self._implicit
        begin_use = steps.begin_use if self._device.type == "cpu" else partial(self._begin_use, steps)
        self.passes.set_listeners(begin_use, implicit.begin, implicit.end, implicit.abort)
        # Else torch's function is not replaced: a seed of 1 needs no search of graphs.
        if steps.scale.can_differ_from_1:
            self._patches.callback(on_backward_start(steps.scale.begin))

    def _begin_use(self, steps: Steps) -> None:
        stream = torch.accelerator.current_stream(self._device).stream_id
        if stream != self._gradient_stream and torch.is_grad_enabled():
            # Autograd accumulates a gradient, and runs our hooks, on the stream that was current when its node was
            # made. On another stream than the forward's they would free memory that the backward still uses.
            self._gradient_stream = stream
            for unit in self.passes.units:
                unit.accumulators.clear()
                forget_accumulators(unit.params())
                unit.find_accumulators()
        steps.begin_use()

    def take_part(self, steps: Steps, call: Call) -> None:
        if call in (Call.BACKWARD, Call.LAST_BACKWARD):
            with steps.accumulated.accumulate(last=call is Call.LAST_BACKWARD):
                steps.backward(lambda: None)  # all units count as unused
            return
        with torch.set_grad_enabled(call is Call.FORWARD):
            # An empty forward: only its rounds of gathers, in which the ranks with data need this rank's shards.
            self.passes.begin_forward()
            self.passes.end_forward(keeps_graph=call is Call.FORWARD)

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        steps.begin_use()
        for check in steps.features.before_evaluation:
            check(batch)
        ready = self.model_call.ready(batch, steps.scale.mark_input)
        with self.passes.failing_forward():
            return [self.model_call.loss(self.model_call.run(ready, lambda: call(self._module, ready)), ready)]

    def tried_loss(self, ready: Any) -> Tensor:
        return self.model_call.loss(self.tried_output(ready), ready)

    def tried_output(self, ready: Any) -> Any:
        return self.model_call.output(self._module, ready)

    def summed_over_stages(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers
