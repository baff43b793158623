"""Old values of what was updated before the whole gradient was known, for the case that it should not have been."""

from __future__ import annotations

from collections.abc import Callable

from ..offload import OldVersion


class Speculation:
    """A step whose shards are updated as their gradients come, taken back if the norm or a bad value asks for it.

        backward   update n-1, update n-2, ..., update rest        with old values kept
        step       norm within the limit: forget them    else: restore all, and update again in the plain way

    The old values of states in memory are copied, as many bytes as the states take; those in a store stay there, and
    the new ones are written beside them. While it is not open nothing is kept.
    """

    def __init__(self) -> None:
        self._old: list[OldVersion] = []
        self.is_open = False

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are held now."""
        return sum(old.nbytes for old in self._old)

    def begin(self) -> None:
        self.is_open = True

    def keep(self, make_old: Callable[[], OldVersion]) -> None:
        """What is changed from now on can be taken back."""
        if self.is_open:
            self._old.append(make_old())

    def roll_back(self) -> None:
        """Puts everything back, the last first."""
        while self._old:
            self._old.pop().restore()
        self.is_open = False

    def forget(self) -> None:
        """The step counts: nothing will be asked for again."""
        self._old.clear()
        self.is_open = False
