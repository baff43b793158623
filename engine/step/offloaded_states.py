"""Offload the states of an engine between steps, so that generation or another training can use the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Self

from torch import Tensor

from ...comm import Activity
from ...offload import OffloadedMemory, host_is_pinned
from ...zero.sequence import StateError
from .features import Access, StepFeature
from .parts import Parts

_PARAMETERS = "parameters"
_KINDS = ("optimizer", "gradients", _PARAMETERS)


class OffloadedStates(StepFeature):
    """Moves states to the host and back. It is on while states are on the host."""

    is_on = False

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._memory: dict[str, OffloadedMemory] = {}  # by kind

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def before_call(self, what: str, access: Access) -> None:
        """Raise StateError if the call needs states that are on the host."""
        if access is Access.CLOSES:
            self.reload()
        needed = {Access.NOTHING: (), Access.LOOKS: (_PARAMETERS,)}.get(access, _KINDS)
        if found := [kind for kind in self._memory if kind in needed]:
            raise StateError(
                f"{what}: expected the states of the engine on its device, found {' and '.join(found)} on the host "
                "since engine.offload_states(); call engine.reload_states() before"
            )

    def offload(self, include: Collection[str] | None, pin_memory: bool) -> int:
        """See `Engine.offload_states`."""
        what, parts = "engine.offload_states()", self._parts
        asked = _KINDS if include is None else tuple(include)
        units, steps = parts.runner.passes.units, parts.steps
        groups = [group for unit in units for group in unit.groups]
        if unknown := [kind for kind in asked if kind not in _KINDS]:
            raise ValueError(f"{what}: expected some of {', '.join(_KINDS)} in include, found {unknown[0]!r}")
        if include is not None and _PARAMETERS in asked and not any(group.frees_memory for group in groups):
            raise ValueError(
                f"{what}: expected parameters that are freed after use (stage 3 over several ranks that share no "
                "memory), found all of them kept on the device; leave 'parameters' out"
            )
        steps.check_between(what)
        device = parts.mesh.world.device
        pinned = pin_memory and host_is_pinned(device)

        def tensors_of(kind: str) -> Iterator[Tensor]:
            if kind == "optimizer":
                yield from parts.optimizer.held()
            elif kind == "gradients":
                for gradient in (one for unit in units for one in unit.gradients):
                    yield from gradient.held()
            else:
                for group in groups:
                    yield from group.held_at_rest()

        if not self._memory:  # else no update can be pending
            with steps.apart(Activity.WEIGHTS, Access.READS):
                parts.runner.passes.release_all()
        freed = 0
        # Before the first copy: if the host is full at a later kind, earlier kinds have left, and calls must be
        # refused.
        steps.features.turn_on(self)
        for kind in asked:
            if kind not in self._memory:
                memory = self._memory[kind] = OffloadedMemory(tensors_of(kind), device, pinned)
                freed += memory.nbytes
        return freed

    def reload(self) -> None:
        """See `Engine.reload_states`."""
        for kind, memory in list(self._memory.items()):
            memory.reload()
            del self._memory[kind]
        self._parts.steps.features.turn_off(self)
