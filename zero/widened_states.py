"""8-bit states as float32, for whoever reads or writes them by element: checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..kernels.optimizer_states import SCALE_SUFFIX, StoredState


@dataclass
class _Open:
    """The states of one part of a shard."""

    part: object
    stored: Callable[[bool], Mapping[str, Tensor]]
    values: dict[str, Tensor]
    has_changed: bool


class WidenedStates:
    """Holds the float32 values of one part of a shard at a time, and brings changes back into its bytes."""

    def __init__(self) -> None:
        self._open: _Open | None = None

    def open(self, part: object, stored: Callable[[bool], Mapping[str, Tensor]], changes: bool) -> dict[str, Tensor]:
        """The values by name, (n,) float32, until another part is opened.

        stored: gives payloads and scales, as `new_states` names them; told whether they are for change.
        """
        if self._open is None or self._open.part is not part:
            self.settle()
            values = {name: state.widened() for name, state in _states_in(stored(False)).items()}
            self._open = _Open(part, stored, values, False)
        self._open.has_changed = self._open.has_changed or changes
        return self._open.values

    def settle(self) -> None:
        """Ends the use of what is open. Values that changed are rounded to the nearest that 8 bits have."""
        opened, self._open = self._open, None
        if opened is not None and opened.has_changed:
            for name, state in _states_in(opened.stored(True)).items():
                state.narrow(opened.values[name])


def _states_in(tensors: Mapping[str, Tensor]) -> dict[str, StoredState]:
    return {
        name: StoredState(tensor, tensors.get(name + SCALE_SUFFIX))
        for name, tensor in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }
