"""The interface of the runners: they run the forwards and backwards of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...zero.unit import Unit
from ..archive.named_state import UnsplitModel
from .batch import ModelCall
from .call_guard import CallGuard
from .join import Call
from .steps import Steps, UnitPasses


class Runner(Protocol):
    """Runs forwards and backwards with the whole model, or by the schedule of a pipeline.

    Methods that run something get the `Steps` of the engine, to report each backward to it.
    """

    @property
    def passes(self) -> UnitPasses:
        """Return this rank's units. Hooks or the schedule take them through forward and backward."""

    @property
    def whole(self) -> UnsplitModel:
        """Return the names and parameters of the whole model. This rank may have a part of it."""

    @property
    def model_call(self) -> ModelCall:
        """Return the object that calls the model with a batch."""

    def tried_loss(self, ready: Any) -> Tensor | None:
        """Return the loss of a forward that is made for a check. None: another rank has it."""

    @property
    def tried_output(self) -> Callable[[Any], Any] | None:
        """Return a function that returns the model's output in a forward for a check. None: this rank has none."""

    def summed_over_stages(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the sums of `numbers` over the ranks that have parts of the model."""

    def register_groups(self, units: Sequence[Unit]) -> None:
        """Learn that parameters of these units have gradients from now on. All ranks call it."""

    def watch_backwards(self, steps: Steps, call_guard: CallGuard) -> None:
        """Listen to backwards that the caller starts by `loss.backward()`. Called before the first forward."""

    def train(self, steps: Steps, batch: Any) -> None:
        """Run the forwards and backwards of a step. batch: of all its microbatches, or an iterator of microbatches."""

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the model. Raise ValueError if this rank has a part of the model."""

    def run(self, steps: Steps, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return function(*args, **kwargs). The function may call the model or its parts.

        Raises ValueError if ranks have parts of the model or of its inputs.
        """

    def backward(self, steps: Steps, loss: Tensor) -> None:
        """Run the backward of a loss of `forward`. Raise ValueError if the value is no loss."""

    def scale(self, steps: Steps, loss: Tensor) -> Tensor:
        """Return the loss. Its `backward()` does the same as `backward`. Raise ValueError if the value is no loss."""

    def take_part(self, steps: Steps, call: Call) -> None:
        """Run a forward or backward without data, as a partner of ranks with data. Raise ValueError over a pipeline."""

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        """Return the loss of a batch, (), in a list; an empty list on ranks that do not know it."""
