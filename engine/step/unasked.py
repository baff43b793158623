"""Backwards that autograd runs without the engine having been asked: `loss.backward()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...comm import Activity, Progress
from ...zero.autograd import current_graph_task
from ...zero.sequence import StateError, UnitSequence
from .shown_gradients import ShownGradients
from .steps import Steps
from .turn import Turn


class Unasked:
    """Makes of each what `engine.backward` is: see `BackwardListener`. Has the engine's turn until autograd is done."""

    def __init__(self, passes: UnitSequence, steps: Steps, turn: Turn, progress: Progress) -> None:
        self._passes = passes
        self._steps = steps
        self._turn = turn
        self._progress = progress
        self._shown = steps.features.get(ShownGradients)
        self._losses: dict[int, Tensor] = {}  # by the run of autograd that they are of

    def known(self, scaled: Tensor, loss: Tensor) -> Tensor:
        """As `scaled`, (); when its backward begins, `loss` is what it is of."""

        def hook(gradient: Tensor) -> None:
            self._losses[current_graph_task()] = loss

        own = scaled.view_as(scaled)
        own.register_hook(hook)  # type: ignore[no-untyped-call]
        return own

    def before_use(self) -> None:
        self._steps.begin_use()

    def begin(self, arrived: nn.Parameter | None) -> None:
        self._turn.begin("loss.backward()", self._is_lost)
        try:
            self._progress.enter(Activity.BACKWARD, self._steps.so_far.num_microbatches)
            with self._shown.set_aside(arrived):
                self._steps.begin_backward()
        except BaseException:
            self._turn.end()
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
            self._steps.so_far.note_loss(self._losses.get(current_graph_task()))
        finally:
            self._losses.clear()
            self._turn.end()

    def abort(self) -> None:
        self._turn.end()
        self._steps.abort_backward(StateError("loss.backward() was ended by an error"))

    def _is_lost(self) -> bool:
        """Whether the turn has come back without `end`."""
        if not self._passes.has_lost_backward():
            return False
        self.abort()
        return True


def check_loss(loss: object, call: str, error: type[ValueError] = ValueError) -> None:
    """Raises `error` for what no backward can begin with."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise error(
            f"{call}: expected a loss with one element that requires a gradient, found {_describe(loss)}; "
            "was it computed under torch.no_grad(), or detached?"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))}"
    return f"{type(value).__name__}"
