"""Moving averages of master weights, divided over the ranks as these are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..offload import bytes_in_memory, huge_zeros
from .layout import Piece
from .sequence import StateError
from .shard_state import ShardState

_SWAPPED_NUMEL = 1 << 18
"""Elements that are exchanged at a time: what that takes beside the two."""


class Averages:
    """An exponential moving average of each master weight, in its dtype; in float32 where that is bfloat16.

        average = average + (1 - decay) * (master weight - average)         after each step that counts

    The first step copies, and before it the averages are the master weights as they were. They are in memory beside
    the master weights; in host memory where these rest elsewhere.
    Source: torch.optim.swa_utils, AveragedModel with get_ema_multi_avg_fn; Polyak and Juditsky, 1992.
    """

    def __init__(self, shards: Sequence[ShardState], decay: float) -> None:
        """Raises ValueError for a decay that is not between 0 and 1."""
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"engine.ema(): expected a decay from 0 to 1, found {decay!r}")
        self.decay = decay
        self.num_updates = 0
        self.are_shown = False
        """Averages and master weights have changed places."""
        self._shards = list(shards)
        self._values = {id(shard): self._memory_for(shard) for shard in shards}
        self.reset()

    def add(self, shard: ShardState) -> None:
        """Keeps those of another shard, which begin with its master weights of now."""
        self._shards.append(shard)
        self._values[id(shard)] = self._memory_for(shard)
        for start, master in shard.masters():
            self._values[id(shard)][start : start + master.numel()].copy_(master)

    def held(self) -> Iterator[Tensor]:
        """In memory, wherever."""
        return iter(self._values.values())

    @property
    def nbytes(self) -> int:
        return sum(map(bytes_in_memory, self.held()))

    def reset(self) -> None:
        """They are the master weights of now, and the next update copies."""
        self.num_updates = 0
        self._take_over()

    def update(self, ahead: bool = False) -> None:
        """After a step. ahead: of its parameters, `ShardState.ahead` has the new values."""
        if self.num_updates:
            for average, master in self._pairs(ahead=ahead):
                average.lerp_(master.to(average), 1 - self.decay)
        else:
            self._take_over(ahead)
        self.num_updates += 1

    def swap(self, shown: bool) -> None:
        """Averages and master weights change places, bit by bit; what is computed of the weights has to follow.

        shown: whether the averages go where the weights are. Where these are bfloat16, they are rounded to it there.
        """
        for average, master in self._pairs(changes=True):
            for low in range(0, average.numel(), _SWAPPED_NUMEL):
                ours, theirs = average[low : low + _SWAPPED_NUMEL], master[low : low + _SWAPPED_NUMEL]
                if ours.dtype == theirs.dtype:
                    before = ours.clone()
                    ours.copy_(theirs)
                    theirs.copy_(before)
                elif shown:
                    _show(ours, theirs)
                else:
                    _hide(ours, theirs)

    def of(self, shard: ShardState, piece: Piece) -> Tensor:
        """Of a piece of the shard, (piece.numel,)."""
        return self._values[id(shard)][piece.offset_in_shard : piece.offset_in_shard + piece.numel]

    def check_hidden(self, what: str) -> None:
        """Raises StateError while they are shown. what: how users read the call that would change the weights then."""
        if self.are_shown:
            raise StateError(
                f"{what}: expected the weights of the training, found averages in their place: it is inside of `with "
                "engine.ema_weights():`, which is for evaluation and export; call it after that"
            )

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _memory_for(self, shard: ShardState) -> Tensor:
        numel, device = shard.group.layout.shard_numel, shard.group.shard.device
        dtype = torch.promote_types(shard.form.master_dtype, torch.float32)
        return huge_zeros(numel, dtype, torch.device("cpu") if shard.is_apart else device)

    def _take_over(self, ahead: bool = False) -> None:
        for average, master in self._pairs(ahead=ahead):
            average.copy_(master)

    def _pairs(self, changes: bool = False, ahead: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """(average, master weights) of each stretch, until the next one is asked for."""
        for shard in self._shards:
            for start, master in shard.masters(changes, ahead):
                yield self._values[id(shard)][start : start + master.numel()], master


def _show(average: Tensor, master: Tensor) -> None:
    """master, (n,) bfloat16, becomes the average, (n,) float32, rounded; and that the master and what rounding lost."""
    bits = average.view(torch.int32)
    rounded = (bits >> 16) + (bits >> 15 & 1)
    kept = (master.view(torch.int16).to(torch.int32) << 16) | (bits & 0xFFFF)
    master.view(torch.int16).copy_(rounded)
    bits.copy_(kept)


def _hide(average: Tensor, master: Tensor) -> None:
    """The way back of `_show`, bit by bit."""
    bits = average.view(torch.int32)
    lost = bits & 0xFFFF
    before = (master.view(torch.int16).to(torch.int32) - (lost >> 15) << 16) | lost
    master.view(torch.int16).copy_(bits >> 16)
    bits.copy_(before)
