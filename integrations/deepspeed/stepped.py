"""A scheduler of the caller's, as the engine steps one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_OWN = ("_scheduler", "_num_samples", "kwargs")


class SteppedScheduler:
    """After each update `step` is called with what `engine.step(lr_kwargs)` was given; where it needs one argument and
    got none, that is the number of samples of the step: Megatron's count these.

    Everything else is the scheduler's own.
    """

    def __init__(self, scheduler: Any, num_samples: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._num_samples = num_samples
        self.kwargs: dict[str, Any] = {}

    def step(self) -> None:
        needed = _num_needed(self._scheduler.step)
        if needed and not self.kwargs:
            self._scheduler.step(self._num_samples())
        else:
            self._scheduler.step(**self.kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._scheduler, name, value)


def _num_needed(call: Callable[..., Any]) -> int:
    """How many arguments have no default."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(call).parameters.values()
    return sum(one.kind in named and one.default is inspect.Parameter.empty for one in parameters)
