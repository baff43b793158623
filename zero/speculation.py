"""Old values of what was updated before the whole gradient was known, for the case that it should not have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .group import values_of
from .shard_state import ShardState, StatePart


@dataclass(frozen=True)
class _Old:
    """Copies of a stretch in memory, as it was before its update."""

    shard: ShardState
    part: StatePart
    master: Tensor  # of mixed precision with stored states: what is computed with, in its place
    states: Sequence[Tensor]


class Speculation:
    """A step whose shards are updated as their gradients come, taken back if the norm or a bad value asks for it.

        backward   update n-1, update n-2, ..., update rest        with old values kept
        step       norm within the limit: forget them    else: restore all, and update again in the plain way

    The old values of states in memory are copied, as many bytes as the states take; those in a store stay there, and
    the new ones are written beside them.
    """

    def __init__(self) -> None:
        self._old: list[_Old] = []
        self.is_open = False

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are held now."""
        return sum(old.master.nbytes + sum(state.nbytes for state in old.states) for old in self._old)

    def begin(self) -> None:
        self.is_open = True

    def remember(self, shard: ShardState, part: StatePart) -> None:
        """Copies what an update of the part will change in memory: parameters, and states that are not stored."""
        is_elsewhere = part.is_stored and shard.is_mixed
        own = values_of(shard.group.own_values())[part.start : part.end]
        master = (own if is_elsewhere else part.master).clone()
        states = [] if part.is_stored else [state.clone() for state in part.states]
        self._old.append(_Old(shard, part, master, states))

    def roll_back(self) -> None:
        """Puts everything back that is in memory; the computed copies of master weights too."""
        for old in self._old:
            shard, start, end = old.shard, old.part.start, old.part.end
            own = values_of(shard.group.own_values(changes=True))
            own[start:end].copy_(old.master)
            if shard.is_mixed and not old.part.is_stored:
                old.part.master.copy_(old.master)
            for state, value in zip(old.part.states, old.states, strict=False):
                state.copy_(value)
        self.forget()

    def forget(self) -> None:
        """The step counts: nothing will be asked for again."""
        self._old.clear()
        self.is_open = False
