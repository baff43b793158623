"""What a step must know of a gradient: the sum of its squares, and whether all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Axis, regions_of
from ..kernels.sum_of_squares import squares_by_block
from .exact_sum import NUM_LIMBS, to_limbs
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

    found: (NUM_LIMBS + 1,) int64, on the device: the squares as limbs, and a last one that is 1 where a value is not
    finite. A value that is not finite stays so in all sums that it goes into.
    """

    def __init__(self, group: ShardedGroup) -> None:
        self._group = group
        self.found = self._nothing()
        self._first: NonFinite | None = None

    def forget(self) -> None:
        """The next gradient is of another step."""
        self.found = self._nothing()
        self._first = None

    def count_anew(self) -> None:
        """The total that was counted is not the last one of its step."""
        self.found[:-1] = 0

    def look(self, axis: Axis, offset: int, total: Tensor, terms: Sequence[Tensor], counts: bool) -> None:
        """total: from `offset` of the shard on. terms: of the ranks of the axis, on the CPU; none: they are not known.

        counts: the total is final, and this rank is the one that counts it.
        """
        squares = squares_by_block(total, BLOCK_NUMEL)
        is_finite = torch.isfinite(squares)
        is_bad = ~is_finite.all().to(self.found.device)
        self.found[-1:] |= is_bad
        if terms and bool(is_bad):  # where there are none, the value can be found later as well
            self._trace(axis, offset, total, terms)
        if counts:
            self.found[:-1] += to_limbs(torch.where(is_finite, squares, 0)).to(self.found.device)

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found that is not. Waits for the device."""
        return not bool(self.found[-1])

    def first(self, shard: Tensor | None, is_own: bool) -> NonFinite | None:
        """The first value that is not finite. Waits for the device.

        shard: where it is looked for, if it was not traced. is_own: nobody but the ranks of the axes had a part in it.
        """
        if self._first is None and shard is not None and not self.is_finite:
            replicas = self._group.replica_axis
            mine = regions_of(shard.numel(), replicas.size)[replicas.rank]
            is_alone = self._group.state_axis.size == replicas.size == 1
            self._trace(replicas, mine.start, shard[mine], (shard,) if is_alone and is_own else ())
        return self._first

    def _nothing(self) -> Tensor:
        return torch.zeros(NUM_LIMBS + 1, dtype=torch.int64, device=self._group.full.device)

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
