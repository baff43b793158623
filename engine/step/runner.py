"""What runs the forwards and backwards of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...zero.unit import Unit
from ..archive.named_state import UnsplitModel
from .call_guard import CallGuard
from .join import Call
from .model_call import ModelCall
from .steps import Steps, UnitPasses


class Runner(Protocol):
    """Runs them with the whole model, or by the schedule of a pipeline; the engine does not know which.

    Every method is given the steps of the engine, which are told of each backward.
    """

    @property
    def passes(self) -> UnitPasses:
        """This rank's units, which hooks or the schedule take through forward and backward."""

    @property
    def whole(self) -> UnsplitModel:
        """The model, of which this rank may have a part."""

    @property
    def model_call(self) -> ModelCall:
        """What the model is called with."""

    @property
    def passes_output(self) -> bool:
        """Whether this rank knows of `tried_output`."""

    def tried_loss(self, ready: Any) -> Tensor | None:
        """Of a forward that is made for a check; None: another rank has it."""

    def tried_output(self, ready: Any) -> Any:
        """The same, of what the model returns."""

    def summed_over_stages(self, numbers: Sequence[int]) -> Sequence[int]:
        """Over the ranks that have parts of the model."""

    def register_groups(self, units: Sequence[Unit]) -> None:
        """Parameters of some units have gradients from now on. Called on all ranks, whichever units they have."""

    def watch_backwards(self, steps: Steps, call_guard: CallGuard) -> None:
        """Before the first forward: where backwards come from that the engine is not asked for."""

    def train(self, steps: Steps, batch: Any) -> None:
        """The forwards and backwards of all microbatches of a step. batch: of it, or an iterator of microbatches."""

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns. Raises ValueError where this rank has a part of it."""

    def run(self, steps: Steps, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function gives that calls the model, or parts of it. Raises ValueError where ranks have parts of it,
        or of what it is given."""

    def backward(self, steps: Steps, loss: Tensor) -> None:
        """The backward of a loss of `forward`. Raises ValueError for what is none."""

    def scale(self, steps: Steps, loss: Tensor) -> Tensor:
        """The loss, whose `backward()` is as `backward`. Raises ValueError for what is none."""

    def take_part(self, steps: Steps, call: Call) -> None:
        """A forward or backward that other ranks make with data, without any. Raises ValueError over a pipeline."""

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        """The loss of a batch, (), on the ranks that come to know it."""
