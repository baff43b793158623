"""What was made once, and is made again of nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Made = TypeVar("Made")


class Memo:
    """By what it is, and of what it was made."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Hashable], Any] = {}

    def once(self, what: str, of: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gave when it was called of this; it is called where it was not. An error is not kept."""
        key = (what, of)
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def first(self, what: str, of: Hashable) -> Any:
        """What is known already; None where nothing is."""
        return self._made.get((what, of))
