"""Moving averages of an engine's weights: updated with each step, and swapped in for the weights on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from ...comm import BODY, Activity
from ...zero.averages import Averages
from .call_guard import CallGuard
from .features import Access, StepFeature
from .parts import Parts

_SWAPPED_IN_PART = (
    "engine.ema_weights(): an error interrupted the exchange of weights and averages, so some weights may be averages; "
    "continue from a checkpoint (engine.load_checkpoint), or start again"
)


class AveragedWeights(StepFeature):
    """An exponential moving average (EMA) of the master weights, sharded like optimizer states.

    The optimizer updates it. The feature is on while the averages are in the place of the weights.
    """

    is_on = False

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def before_call(self, what: str, access: Access) -> None:
        """Raise StateError if the call would change the averages in the place of the weights."""
        if access in (Access.CHANGES, Access.REPLACES, Access.CLOSES) and self._parts.optimizer.averages is not None:
            self._parts.optimizer.averages.check_hidden(what)

    def keep(self, decay: float) -> None:
        """See `Engine.ema`."""
        optimizer = self._parts.optimizer
        if optimizer.averages is not None:
            raise ValueError(
                f"engine.ema(): expected one call, found another: averages with decay "
                f"{optimizer.averages.decay:g} are kept already"
            )
        with self._parts.steps.apart(Activity.WEIGHTS, Access.READS):
            optimizer.averages = Averages(optimizer.shards, decay)

    @contextmanager
    def shown(self, call_guard: CallGuard, swap: Callable[[Averages, bool], None]) -> Iterator[None]:
        """See `Engine.ema_weights`. swap: as `Archive.swap`."""
        averages, features = self._parts.optimizer.averages, self._parts.steps.features
        if averages is None:
            raise ValueError("engine.ema_weights(): expected averages, found none; call engine.ema(decay) first")

        def swapped(shown: bool) -> None:
            with call_guard.of("engine.ema_weights()"):
                with self._parts.steps.apart(Activity.WEIGHTS, Access.CHANGES):
                    try:
                        swap(averages, shown)
                    except BaseException as error:
                        self._parts.steps.update.fault = _SWAPPED_IN_PART
                        error.add_note(_SWAPPED_IN_PART)
                        raise
                averages.are_shown = shown

        # Outside of `try`: if this swap fails, there is nothing to swap back.
        swapped(True)
        features.turn_on(self)
        try:
            with call_guard.error_broadcast.call(f"{BODY}engine.ema_weights()", is_context=True):
                yield
        finally:
            # Before the swap, which `before_call` would refuse while the feature is on.
            features.turn_off(self)
            if not call_guard.is_over:
                swapped(False)
