"""What of an engine is on the host for now."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...offload import LentMemory
from ...zero.sequence import StateError

PARAMETERS = "parameters"
KINDS = ("optimizer", "gradients", PARAMETERS)


class Lent:
    """By kind, while others have the device's memory of it."""

    def __init__(self) -> None:
        self._memory: dict[str, LentMemory] = {}

    @property
    def kinds(self) -> Sequence[str]:
        return tuple(self._memory)

    def add(self, kind: str, memory: LentMemory) -> None:
        self._memory[kind] = memory

    def take_back(self) -> None:
        for kind, memory in list(self._memory.items()):
            memory.take_back()
            del self._memory[kind]

    def check(self, what: str, kinds: Collection[str] = KINDS) -> None:
        """Raises StateError where some of the kinds are lent. what: how users read the call that needs them."""
        found = [kind for kind in self._memory if kind in kinds]
        if found:
            raise StateError(
                f"{what}: expected the states of the engine on its device, found {' and '.join(found)} on the host "
                "since engine.offload_states(); call engine.reload_states() before"
            )
