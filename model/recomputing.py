"""A forward that is computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recomputing:
    """What a module's forward is replaced by. Where the module is to be compiled, `forward` is.

    around: called with it, and with what it is called with.
    """

    around: Callable[..., Any]
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.forward, *args, **kwargs)
