"""Between steps the device's memory of an engine can be lent: to what generates, or to another training."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from ..comm import Activity
from ..offload import LentMemory, host_is_pinned
from ..zero.optimizer import ShardedOptimizer
from .step.driver import Driver
from .step.lent import KINDS, PARAMETERS
from .step.steps import Access, Steps
from .step.turn import Turn, in_turn


class LentStates:
    """Takes states off the device between steps, and back."""

    optimizer: ShardedOptimizer
    _turn: Turn
    _steps: Steps
    _driver: Driver

    @in_turn
    def offload_states(self, include: Collection[str] | None = None, pin_memory: bool = True) -> int:
        """Takes states from the device to host memory until `reload_states`; returns the bytes that it frees.

        include: of "optimizer" (its states, master weights, averages), "gradients" (what is kept of them between steps)
        and "parameters" (this rank's shards, where the stage frees parameters after use); None: all that there are.
        What rests on the host anyway stays there. pin_memory: of the copies. All ranks must call it, between steps.
        Until `reload_states` a training call, a change and a save raise StateError; without "parameters" the model can
        be run. Raises ValueError for other kinds, and OffloadError where the host has not enough memory.
        """
        what = "engine.offload_states()"
        asked = KINDS if include is None else tuple(include)
        units = self._driver.passes.units
        groups = [group for unit in units for group in unit.groups]
        if unknown := [kind for kind in asked if kind not in KINDS]:
            raise ValueError(f"{what}: expected of {', '.join(KINDS)}, found {unknown[0]!r}")
        if include is not None and PARAMETERS in asked and not any(group.frees_memory for group in groups):
            raise ValueError(
                f"{what}: expected parameters that are freed after use, with stage 3 over several ranks, found a model "
                "that has all of them; leave 'parameters' out"
            )
        self._steps.check_between(what)
        device = self._steps.device
        pinned = pin_memory and host_is_pinned(device)

        def tensors_of(kind: str) -> Iterator[Tensor]:
            if kind == "optimizer":
                yield from self.optimizer.held()
            elif kind == "gradients":
                for gradient in (one for unit in units for one in unit.gradients):
                    yield from gradient.held()
            else:
                for group in groups:
                    yield from group.held_at_rest()

        lent = self._steps.lent
        if not lent.kinds:  # else nothing can be under way
            with self._steps.apart(Activity.WEIGHTS, Access.READS):
                self._driver.passes.release_all()
        freed = 0
        for kind in asked:
            if kind not in lent.kinds:
                memory = LentMemory(tensors_of(kind), device, pinned)
                lent.add(kind, memory)
                freed += memory.nbytes
        return freed

    @in_turn
    def reload_states(self) -> None:
        """What `offload_states` has taken is on the device again; without it nothing happens. Waits for the device.

        Raises torch's own error where the device has not enough memory; free some, and call it again.
        """
        self._steps.lent.take_back()
