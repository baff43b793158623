"""Parts of a step that are there only where a config, or a call, asks for them.

[Note: moments of a step]
    forward     before_forward | around_forward ( the model )
    backward    before_backward | autograd; gradients are reduced as they come | after_backward
    step        before_update | the sum over ranks, the update | after_update | after_step | before_next_step

An engine has the features that are on, in the order of a table (`engine/features.py`). For each moment it holds the
methods that they define: a feature that is off, or that does not define a moment, is not called there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from .step_result import StepResult


class StepFeature:
    """A feature defines the moments that it needs. An exception ends the call of the engine that the moment is in."""

    @classmethod
    def of(cls, parts: Any) -> Self | None:
        """The feature that the config asks for, when an engine is made; None: it is off. A collective, if need be.

        parts: the `Parts` of the engine.
        """
        return None

    def before_forward(self, batches: Sequence[Any]) -> None:
        """Before a forward, with what the caller gives it; with stages, of all microbatches of a step together."""

    def after_step(self, step: int, result: StepResult) -> None:
        """So many steps are done. Where it raises SystemExit, the engine is closed."""

    def before_next_step(self, step: int) -> None:
        """After all of `after_step`, and before the first step: what is to be there during the next one begins."""

    def forbids_files(self, what: str) -> bool:
        """Whether an export or a checkpoint (what) is not to be written."""
        return False

    def before_save(self) -> None:
        """Before a checkpoint is written."""

    def after_load(self, step: int) -> None:
        """A checkpoint was loaded: the training goes on after so many steps."""

    def close(self) -> None:
        """The engine is closed. Those that are on, the last one first, each whatever becomes of the others."""


F = TypeVar("F", bound=StepFeature)


class StepFeatures:
    """The features of an engine; by moment, the methods of those that are on."""

    before_forward: tuple[Callable[[Sequence[Any]], None], ...]
    after_step: tuple[Callable[[int, StepResult], None], ...]
    before_next_step: tuple[Callable[[int], None], ...]
    forbids_files: tuple[Callable[[str], bool], ...]
    before_save: tuple[Callable[[], None], ...]
    after_load: tuple[Callable[[int], None], ...]

    def __init__(self, order: Sequence[type[StepFeature]]) -> None:
        self._order = order
        self._on: list[StepFeature] = []
        self._collect()

    def begin(self, parts: Any) -> None:
        """Those that the config asks for are on. A collective."""
        self._on = [one for kind in self._order if (one := kind.of(parts)) is not None]
        self._collect()

    def find(self, kind: type[F]) -> F | None:
        """The feature of that class that is on."""
        return next((one for one in self._on if isinstance(one, kind)), None)

    def turn_on(self, feature: StepFeature) -> None:
        """Does nothing where it is on."""
        if feature not in self._on:
            self._on.append(feature)
        self._on.sort(key=lambda one: self._order.index(type(one)))
        self._collect()

    def turn_off(self, feature: StepFeature) -> None:
        """Does nothing where it is not on."""
        self._on = [one for one in self._on if one is not feature]
        self._collect()

    def close(self) -> None:
        with ExitStack() as closing:
            for one in self._on:
                closing.callback(one.close)

    def _collect(self) -> None:
        for moment in StepFeatures.__annotations__:
            defined = [one for one in self._on if getattr(type(one), moment) is not getattr(StepFeature, moment)]
            setattr(self, moment, tuple(getattr(one, moment) for one in defined))
