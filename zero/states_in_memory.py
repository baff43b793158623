"""Master weights and states of those elements of a shard that have them in memory between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.optimizer_states import STATE_BLOCK_NUMEL
from ..kernels.shard_update import ShardUpdate
from ..offload import huge_zeros
from .state_kinds import NewStates, scaled_numel
from .weight_form import WeightForm


class StatesInMemory:
    """Of elements [0, numel) of a shard. Masters are there at once, states from `make` until `forget`."""

    def __init__(self, numel: int, form: WeightForm, device: torch.device, new_states: NewStates) -> None:
        self.numel = numel
        self.master = huge_zeros(numel, torch.float32, device) if form.is_mixed else None
        """(numel,), where it is beside the parameters."""
        self.states: dict[str, Tensor] = {}
        self._are_made = False  # of which there may be none
        self.factors: dict[int, dict[str, Tensor]] = {}
        """Index in the group of a matrix that this rank owns -> its states that are not elementwise, by name."""
        self.update: ShardUpdate | None = None
        """What an update of all that is in memory needs, as of the last one; None where other states came since."""
        self._form = form
        self._device = device
        self._new_states = new_states

    def make(self) -> None:
        """Takes memory for the states of the part that is in memory, with their first values; leaves those it has."""
        if self._are_made:
            return
        self._are_made = True
        first = self._new_states(torch.zeros(STATE_BLOCK_NUMEL, dtype=self._form.master_dtype))
        for name, block in first.items():
            if name not in self.states:
                numel = scaled_numel(block.numel(), self.numel)
                self.states[name] = huge_zeros(numel, block.dtype, self._device)
                if block.any():
                    self.states[name].fill_(block[0])  # every element begins alike

    def forget(self) -> None:
        """Gives the memory of `make` back."""
        self.states.clear()
        self.factors.clear()
        self._are_made, self.update = False, None
