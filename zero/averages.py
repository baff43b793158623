"""Moving averages of master weights, sharded like them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..offload import bytes_in_memory, huge_zeros
from .layout import ParamShard
from .sequence import StateError
from .shard_state import ShardState

_SWAPPED_NUMEL = 1 << 18
"""Elements that are exchanged at a time: the memory that a swap takes."""


class Averages:
    """An exponential moving average of each master weight, in its dtype; in float32 if that is bfloat16.

        average = average + (1 - decay) * (master weight - average)         after each step that counts

    The first step copies the master weights; before it the averages are the first master weights. They lie beside the
    master weights, in host memory if those are offloaded. Source: torch.optim.swa_utils, AveragedModel with
    get_ema_multi_avg_fn; Polyak and Juditsky, 1992.
    """

    def __init__(self, shards: Sequence[ShardState], decay: float) -> None:
        """Raises ValueError unless decay is between 0 and 1."""
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"engine.ema(): expected a decay from 0 to 1, found {decay!r}")
        self.decay = decay
        self.num_updates = 0
        self.are_shown = False
        """Whether averages and master weights are swapped."""
        self._shards = list(shards)
        self._values = {id(shard): self._memory_for(shard) for shard in shards}
        self.reset()

    def add(self, shard: ShardState) -> None:
        """Add the averages of another shard, which begin as its current master weights."""
        self._shards.append(shard)
        self._values[id(shard)] = self._memory_for(shard)
        for start, master in shard.masters():
            self._values[id(shard)][start : start + master.numel()].copy_(master)

    def held(self) -> Iterator[Tensor]:
        """Yield the averages, in device or host memory."""
        return iter(self._values.values())

    @property
    def nbytes(self) -> int:
        return sum(map(bytes_in_memory, self.held()))

    def reset(self) -> None:
        """Set the averages to the current master weights. The next update copies again."""
        self.num_updates = 0
        self._take_over()

    def update(self, ahead: bool = False) -> None:
        """Update the averages after a step. ahead: the new values are in `ShardState.versions.ahead`."""
        if self.num_updates:
            for average, master in self._pairs(ahead=ahead):
                # `lerp_` takes equal dtypes only, and bfloat16 master weights have a float32 average.
                average.lerp_(master.to(average), 1 - self.decay)
        else:
            self._take_over(ahead)
        self.num_updates += 1

    def swap(self, shown: bool) -> None:
        """Swap averages and master weights, bit by bit. The caller refreshes the parameters.

        shown: the averages go to the master weights. bfloat16 master weights get them rounded.
        """
        for average, master in self._pairs(changes=True):
            for low in range(0, average.numel(), _SWAPPED_NUMEL):
                ours, theirs = average[low : low + _SWAPPED_NUMEL], master[low : low + _SWAPPED_NUMEL]
                # Equal dtypes swap exactly. bfloat16 needs the lost bits: `_show`.
                if ours.dtype == theirs.dtype:
                    before = ours.clone()
                    ours.copy_(theirs)
                    theirs.copy_(before)
                elif shown:
                    _show(ours, theirs)
                else:
                    _hide(ours, theirs)

    def of(self, shard: ShardState, param_shard: ParamShard) -> Tensor:
        """Return the averages of a piece of the shard, (piece.numel,)."""
        return self._values[id(shard)][param_shard.in_shard]

    def check_hidden(self, what: str) -> None:
        """Raise StateError while the averages are swapped in. what: the user's call that would change the weights."""
        if self.are_shown:
            raise StateError(
                f"{what}: expected the weights of the training, found averages in their place, because the call is "
                "inside of `with engine.ema_weights():`, which is for evaluation and export; call it afterwards"
            )

    # -- helpers --------------------------------------------------------------------------------------------------

    def _memory_for(self, shard: ShardState) -> Tensor:
        numel, device = shard.group.layout.shard_numel, shard.group.shard.device
        dtype = torch.promote_types(shard.form.master_dtype, torch.float32)
        return huge_zeros(numel, dtype, torch.device("cpu") if shard.is_apart else device)

    def _take_over(self, ahead: bool = False) -> None:
        for average, master in self._pairs(ahead=ahead):
            average.copy_(master)

    def _pairs(self, changes: bool = False, ahead: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (average, master weights) of each chunk. They are valid until the next pair."""
        for shard in self._shards:
            for start, master in shard.masters(changes, ahead):
                yield self._values[id(shard)][start : start + master.numel()], master


def _show(average: Tensor, master: Tensor) -> None:
    """Round the average, (n,) float32, into the bfloat16 master; the average keeps the old master and the lost bits."""
    bits = average.view(torch.int32)
    # Ties round up, not to even: the carry is then bit 15 alone. The average keeps it, so `_hide` can subtract it.
    rounded = (bits >> 16) + (bits >> 15 & 1)
    kept = (master.view(torch.int16).to(torch.int32) << 16) | (bits & 0xFFFF)
    master.view(torch.int16).copy_(rounded)
    bits.copy_(kept)


def _hide(average: Tensor, master: Tensor) -> None:
    """Undo `_show`, bit by bit."""
    bits = average.view(torch.int32)
    lost = bits & 0xFFFF
    # `-` binds before `<<`: first the carry is subtracted, then the bits move up.
    before = (master.view(torch.int16).to(torch.int32) - (lost >> 15) << 16) | lost
    master.view(torch.int16).copy_(bits >> 16)
    bits.copy_(before)
