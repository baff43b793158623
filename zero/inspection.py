"""What a step must know of a gradient: the sum of its squares, and whether all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Axis, regions_of
from ..kernels.sum_of_squares import squares_by_block
from .group import ShardedGroup
from .layout import BLOCK_NUMEL


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value that this rank found in a gradient."""

    parameter: str
    rank: int | None  # that produced it; None where only the sum over ranks is known
    what: str = "a NaN or infinite value"


class Inspection:
    """Looks at what was summed, while it is in the cache, and what each rank has sent for it can still be read.

    What it finds stays on the device, and is made a sum once a step (`StepFinding`): nothing waits here for a device. A
    value that is not finite stays so in all sums that it goes into.
    """

    def __init__(self, group: ShardedGroup) -> None:
        self._group = group
        self.counted: list[Tensor] = []
        """Squares by block, (blocks,) float64 each, of what this rank counts in its step."""
        self.was_finite: Tensor | None = None
        """() bool: nothing else that was looked at had a value that is not; None where there was nothing else."""
        self.is_outdated = False
        """The final shard was changed since; what was found is of what it was before."""
        self._first: NonFinite | None = None
        self._kept: tuple[Tensor, Tensor, bool] | None = None  # of `remember`: where, values, is_own

    def forget(self) -> None:
        """The next gradient is of another step."""
        self.counted = []
        self.is_outdated = False
        self.was_finite = self._first = self._kept = None

    def count_anew(self) -> None:
        """The total that was counted is not the last one of its step."""
        counted, self.counted = self.counted, []
        for squares in counted:
            self._note(squares)

    def look(self, axis: Axis, offset: int, total: Tensor, terms: Sequence[Tensor], counts: bool) -> None:
        """total: from `offset` of the shard on. terms: of the ranks of the axis, on the CPU; none: they are not known.

        counts: the total is final, and this rank is the one that counts it.
        """
        squares = squares_by_block(total, BLOCK_NUMEL)
        if terms and not bool(torch.isfinite(squares).all()):  # without them the value can be found later as well
            self._trace(axis, offset, total, terms)
        if counts:
            self.counted.append(squares)
        else:
            self._note(squares)

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found that is not. Waits for the device."""
        return all(map(bool, self._known()))

    def is_bad(self) -> Tensor:
        """(1,) int64, on the device of the gradient, which the host does not get: 1 where that is not so."""
        return torch.stack(self._known()).all().logical_not().long().view(1)

    def remember(self, shard: Tensor, is_own: bool) -> None:
        """As `first`, of a shard that goes. A device is not waited for: the block with the value is kept there."""
        if shard.device.type == "cpu":
            self.first(shard, is_own)
            return
        mine = self._mine(shard)
        region = shard[mine]
        if region.numel():
            squares = self.counted[-1] if self.counted else squares_by_block(region, BLOCK_NUMEL)
            start = (~torch.isfinite(squares)).long().argmax().view(1) * BLOCK_NUMEL
            places = start + torch.arange(min(BLOCK_NUMEL, region.numel()), device=shard.device)
            self._kept = start + mine.start, region[places.clamp_(max=region.numel() - 1)], is_own

    def first(self, shard: Tensor | None, is_own: bool) -> NonFinite | None:
        """The first value that is not finite. Waits for the device.

        shard: where it is looked for, if it was not traced. is_own: nobody but the ranks of the axes had a part in it.
        """
        if self._first is not None or (shard is None and self._kept is None) or self.is_finite:
            return self._first
        if self._kept is not None:
            start, values, was_own = self._kept
            self._trace_alone(int(start), values, was_own)
        if shard is not None:
            mine = self._mine(shard)
            self._trace_alone(mine.start, shard[mine], is_own)
        return self._first

    def _mine(self, shard: Tensor) -> slice:
        """What this rank looks at, of what is the same on all ranks of the axis."""
        replicas = self._group.axes.replicas
        return regions_of(shard.numel(), replicas.size)[replicas.rank]

    def _trace_alone(self, offset: int, values: Tensor, is_own: bool) -> None:
        replicas = self._group.axes.replicas
        is_alone = is_own and self._group.axes.states.size == replicas.size == 1
        self._trace(replicas, offset, values, (values,) if is_alone else ())

    def _known(self) -> list[Tensor]:
        """() bool of each look; what the host has got is counted there."""
        earlier = [] if self.was_finite is None else [self.was_finite]
        return [*earlier, *(torch.isfinite(squares).all() for squares in self.counted)]

    def _note(self, squares: Tensor) -> None:
        is_finite = torch.isfinite(squares).all()
        self.was_finite = is_finite if self.was_finite is None else self.was_finite & is_finite

    def _trace(self, axis: Axis, offset: int, total: Tensor, terms: Sequence[Tensor]) -> None:
        squares = total.double().square()
        if self._first is not None or bool(torch.isfinite(squares.sum())):
            return
        bad = torch.nonzero(~torch.isfinite(squares))
        index = int(bad[0]) if len(bad) else int(squares.argmax())  # of many that are large
        name = self._group.layout.slot_at(self._group.own.start + offset + index).name
        own = axis.rank if axis.rank < len(terms) else None
        in_place = own is not None and terms[own].data_ptr() == total.data_ptr()
        producers = [
            rank
            for index_on_axis, (rank, term) in enumerate(zip(axis.ranks, terms, strict=False))
            if not (in_place and index_on_axis == own) and not torch.isfinite(term[index])
        ]
        if in_place and not producers:
            producers = [axis.ranks[axis.rank]]  # its own term has become the sum; nobody else's was bad
        value = float(total[index])
        what = f"{value:.1e}, whose square is not," if math.isfinite(value) else NonFinite.what
        self._first = NonFinite(name, producers[0] if producers else None, what)
