"""Reduces a full gradient on each rank to shards of the sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Axis, Pending, regions_of
from ..kernels.sum_of_squares import squares_by_block
from .accumulation import Region
from .codec import NOTHING, Codec, Coming
from .group import ShardedGroup
from .layout import BLOCK_NUMEL


class GradientReducer:
    """Sums a group's gradient over the ranks of its sharding spec, with a codec for each axis.

        staged --copy--> message --reduce-scatter over `states`--> shard --all-reduce over `replicas`--> shard

    The sum over `states` may have levels: first over the ranks of a host, then over hosts. Partial sums between levels
    have separate memory.

    A rank's term for its part of the sum need not be in its message: it can be summed where it was staged. If the
    transport supports that (`slots_may_lack_own`), the message has no room for it.
    """

    def __init__(
        self,
        group: ShardedGroup,
        levels: Sequence[Codec],
        replicas: Codec,
        dtype: torch.dtype,
        stats: GradientStats,
    ) -> None:
        """levels: codecs of the sum over `states`. replicas: codec of the sum over `replicas`. dtype: of the sum."""
        self._group = group
        self._dtype = dtype
        self._levels = levels
        self._replicas = replicas
        # The codec in whose message a gradient is staged.
        self._stager = levels[0] if group.axes.states.size > 1 else replicas
        self._counting = [codec for codec in (*levels, replicas) if codec.counts_messages]
        self.has_steps = bool(self._counting)
        """Whether `reset` has an effect."""
        self._inspection = stats
        self._name = f"reduction of {group.plan.name}"
        self.sums: Callable[[], bool] = lambda: True
        """Whether this step sums gradients over replicas; else each replica updates with its gradient, and counts it.
        """

    def staging_axis(self, boundary: bool, has_shard: bool) -> Axis | None:
        """Return the axis in whose message a backward's gradients are staged; None: they are staged in the shard."""
        if self._group.axes.states.size > 1:
            return self._group.axes.states
        # With a sum of earlier microbatches in the shard, the message is made from the shard: see `sum`.
        replica_axis = self._group.axes.replicas
        if replica_axis.size == 1 or not boundary or has_shard or not self.sums():
            return None
        return None if self._replicas.sums_in_place(self._dtype) else replica_axis

    @property
    def adds_exactly(self) -> bool:
        """Whether adding a gradient to the message in two parts gives the bits of autograd's sum."""
        # The first level speaks for all, since the codecs of a group have the same dtype (`reduce_dtype`).
        return self._levels[0].is_exact(self._group.plan.dtype)

    def reset(self) -> None:
        """Begin another step."""
        for codec in self._counting:
            codec.reset()

    def next_message(self, axis: Axis, has_shard: bool) -> Tensor | None:
        """Return the memory that `open_message` will return, to write early; None if it is not free yet."""
        return self._stager.next_message(self._message_numel(axis, has_shard))

    def open_message(self, axis: Axis, has_shard: bool) -> Tensor:
        """Return memory to stage the next gradient in, (padded_numel,), without the part that is summed in place.

        May wait for other ranks.
        """
        return self._stager.open_message(self._message_numel(axis, has_shard), self._name)

    def _message_numel(self, axis: Axis, has_shard: bool) -> int:
        """Elements of a message of `axis`."""
        held = self._held(axis, has_shard) if axis.transport.slots_may_lack_own else NOTHING
        num_held: int = held.stop - held.start
        return self._group.layout.padded_numel - num_held

    def places(self, axis: Axis | None, message: Tensor | None, shard: Tensor, has_shard: bool) -> list[Region]:
        """Return the regions to stage gradients in: the shard, or the message and the part summed in place."""
        numel = self._group.layout.padded_numel
        if axis is None or message is None:
            return [(0, numel, shard)]
        held = self._held(axis, has_shard)
        if held == NOTHING:
            return [(0, numel, message)]
        own = regions_of(numel, axis.size)[axis.place]
        memory = shard if axis is self._group.axes.states else shard[own]
        start, end = own.start + held.start, own.start + held.stop
        # Counted from the end, as the message may have no room for the held part.
        behind = message[message.numel() - (numel - end) :]
        return [(0, start, message[:start]), (start, end, memory[held]), (end, numel, behind)]

    def sum(
        self, axis: Axis | None, message: Tensor | None, shard: Tensor, has_shard: bool, boundary: bool, counts: bool
    ) -> Iterator[Pending]:
        """Sum the staged gradient, a phase for each `next`, which waits for the pending result of the phase before.

        shard: (shard_numel,), with the sum of earlier microbatches, if any. boundary: sum over all ranks. counts: count
        its squares.
        """
        states, replicas = self._group.axes.states, self._group.axes.replicas
        is_last = replicas.size == 1 or not self.sums()
        # No sum over ranks will look at it. A value that was not finite before still is not.
        if message is None and is_last and boundary:
            self._inspection.look(states, 0, shard, (), counts)
        if axis is states and message is not None:
            for codec in self._levels[:-1]:
                message = yield from self._sum_first(codec, message)
            held = self._held(axis, has_shard)
            # The transport may write the sum to its second argument, so a shard with an earlier sum is withheld.
            coming = self._levels[-1].reduce_scatter(message, None if has_shard else shard, self._name)
            if boundary and not is_last:
                # The next phase opens a message to replicas, and `Reductions.poll` must not wait for it there.
                coming = coming._replace(arrived=self._when_free(coming.arrived, self._replicas.staged_numel(shard)))
            yield from self._add_up(states, coming, slice(0, shard.numel()), shard, held, has_shard, counts and is_last)
        if is_last or not boundary:
            return
        mine = regions_of(shard.numel(), replicas.size)[replicas.rank]
        held = slice(0, mine.stop - mine.start)
        if axis is replicas and message is not None:
            held = self._held(axis, has_shard)
        else:
            message = self._replicas.staged(shard, self._name)
            # This rank's term is still in the shard, where the sum is added up.
            held = held if self._replicas.may_lack_own(self._dtype) else NOTHING
        coming = self._replicas.all_reduce(message, shard, self._name)
        yield from self._add_up(replicas, coming, mine, shard, held, False, counts)

    def _sum_first(self, codec: Codec, message: Tensor) -> Generator[Pending, None, Tensor]:
        """Sum over a level that is not the last. Returns the sum, staged for the next level."""
        coming = codec.reduce_scatter(message, None, self._name)
        yield coming.arrived
        coming.arrived.wait()
        numel = coming.region.stop - coming.region.start
        total = torch.empty(numel, dtype=self._dtype, device=message.device)
        coming.add_up(total, NOTHING, False)
        coming.summed()
        return total

    def _when_free(self, pending: Pending, numel: int) -> Pending:
        """As `pending`, but done only when the next message to replicas is free."""
        return Pending(pending.wait, lambda: pending.is_done and self._replicas.next_message(numel) is not None)

    def _held(self, axis: Axis, has_shard: bool) -> slice:
        """Return the range of this rank's region that need not be in the message.

        It is the whole region if that makes the message smaller, and on the shard axis, where memory counts more. Else
        it is whole parameters, whose gradients can then be computed in place (see `Staging.place`).
        """
        if has_shard or not axis.transport.sums_here:
            return NOTHING
        is_one_sum = axis is self._group.axes.replicas or len(self._levels) == 1
        if not is_one_sum or not self._stager.may_lack_own(self._dtype):
            return NOTHING
        own = regions_of(self._group.layout.padded_numel, axis.size)[axis.place]
        if axis is self._group.axes.states or axis.transport.slots_may_lack_own:
            return slice(0, own.stop - own.start)
        start, end = self._group.layout.whole_parameters(own.start, own.stop)
        return slice(start - own.start, end - own.start) if start < end else NOTHING

    def _add_up(
        self, axis: Axis, coming: Coming, mine: slice, shard: Tensor, held: slice, accumulate: bool, counts: bool
    ) -> Iterator[Pending]:
        """Wait for messages, add them up, inspect the sum. mine: the range of the sum that this rank inspects."""
        yield coming.arrived
        coming.arrived.wait()
        of_ranks = coming.add_up(_part(shard, coming.region), held, accumulate)
        # Before `summed`, after which other ranks may overwrite the terms.
        self._inspection.look(axis, mine.start, _part(shard, mine), of_ranks, counts)
        spread = coming.summed()
        if spread is not None:
            yield spread
            spread.wait()


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value that this rank found in a gradient."""

    parameter: str
    rank: int | None  # the rank that produced it; None if only the sum over ranks is known
    what: str = "a NaN or infinite value"


class GradientStats:
    """Inspects sums while they are in cache, and while each rank's term can still be read.

    Results stay on the device and are reduced once a step (`StepFinding`), so nothing waits for a device here. A value
    that is not finite stays non-finite in all later sums.
    """

    def __init__(self, group: ShardedGroup) -> None:
        self._group = group
        self.counted: list[Tensor] = []
        """Sums of squares by block, (blocks,) float64 each, of the elements that this rank counts in its step."""
        self.was_finite: Tensor | None = None
        """() bool: whether all sums that were inspected but not counted were finite; None: no such sums."""
        self.is_outdated = False
        """Whether the final shard has changed since it was inspected."""
        self._first: NonFinite | None = None
        self._kept: tuple[Tensor, Tensor, bool] | None = None  # of `remember`: (offset, values, is_own)

    def forget(self) -> None:
        """Begin another step."""
        self.counted = []
        self.is_outdated = False
        self.was_finite = self._first = self._kept = None

    def count_anew(self) -> None:
        """Stop counting the sum: another backward of the step adds to it."""
        counted, self.counted = self.counted, []
        for squares in counted:
            self._note(squares)

    def look(self, axis: Axis, offset: int, total: Tensor, terms: Sequence[Tensor], counts: bool) -> None:
        """Inspect a sum. total: from `offset` of the shard on. terms: of the axis's ranks, on the CPU; empty if
        unknown.

        counts: the sum is final, and this rank counts it.
        """
        squares = squares_by_block(total, BLOCK_NUMEL)
        if terms and not bool(torch.isfinite(squares).all()):  # without terms a later search finds as much
            self._trace(axis, offset, total, terms)
        if counts:
            self.counted.append(squares)
        else:
            self._note(squares)

    @property
    def is_finite(self) -> bool:
        """Whether everything inspected was finite. Waits for the device."""
        return all(map(bool, self._known()))

    def is_bad(self) -> Tensor:
        """Return (1,) int64 on the gradient's device: 1 if anything was not finite. Does not wait."""
        return torch.stack(self._known()).all().logical_not().long().view(1)

    def remember(self, shard: Tensor, is_own: bool) -> None:
        """As `first`, for a shard that is freed next. Does not wait: it keeps the block with the value."""
        if shard.device.type == "cpu":
            self.first(shard, is_own)
            return
        mine = self._mine(shard)
        region = shard[mine]
        if region.numel():
            # The first bad block is found and copied by the device, in shapes that do not depend on the values.
            squares = self.counted[-1] if self.counted else squares_by_block(region, BLOCK_NUMEL)
            start = (~torch.isfinite(squares)).long().argmax().view(1) * BLOCK_NUMEL
            places = start + torch.arange(min(BLOCK_NUMEL, region.numel()), device=shard.device)
            self._kept = start + mine.start, region[places.clamp_(max=region.numel() - 1)], is_own

    def first(self, shard: Tensor | None, is_own: bool) -> NonFinite | None:
        """Return the first value that is not finite. Waits for the device.

        shard: searched if the value was not traced. is_own: only ranks of the axes have contributed to it.
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
        """The range that this rank inspects, of a shard that is equal on all replicas."""
        replicas = self._group.axes.replicas
        return regions_of(shard.numel(), replicas.size)[replicas.rank]

    def _trace_alone(self, offset: int, values: Tensor, is_own: bool) -> None:
        replicas = self._group.axes.replicas
        is_alone = is_own and self._group.axes.states.size == replicas.size == 1
        self._trace(replicas, offset, values, (values,) if is_alone else ())

    def _known(self) -> list[Tensor]:
        """Return () bool for each inspected sum: whether it was finite."""
        earlier = [] if self.was_finite is None else [self.was_finite]
        return [*earlier, *(torch.isfinite(squares).all() for squares in self.counted)]

    def _note(self, squares: Tensor) -> None:
        is_finite = torch.isfinite(squares).all()
        # In place: a graph that adds to it must find it at the same address each time.
        self.was_finite = is_finite if self.was_finite is None else self.was_finite.logical_and_(is_finite)

    def _trace(self, axis: Axis, offset: int, total: Tensor, terms: Sequence[Tensor]) -> None:
        # float64, as squares of large float32 values overflow.
        squares = total.double().square()
        if self._first is not None or bool(torch.isfinite(squares.sum())):
            return
        bad = torch.nonzero(~torch.isfinite(squares))
        index = int(bad[0]) if len(bad) else int(squares.argmax())  # the largest of many large values
        name = self._group.layout.param_view_at(self._group.own.start + offset + index).name
        # `terms` is empty if the backend has summed.
        own = axis.rank if axis.rank < len(terms) else None
        in_place = own is not None and terms[own].data_ptr() == total.data_ptr()
        producers = [
            rank
            for index_on_axis, (rank, term) in enumerate(zip(axis.ranks, terms, strict=False))
            if not (in_place and index_on_axis == own) and not torch.isfinite(term[index])
        ]
        if in_place and not producers:
            producers = [axis.ranks[axis.rank]]  # its term was overwritten by the sum, and no other term was bad
        value = float(total[index])
        what = f"{value:.1e}, whose square is not," if math.isfinite(value) else NonFinite.what
        self._first = NonFinite(name, producers[0] if producers else None, what)


def _part(tensor: Tensor, region: slice) -> Tensor:
    """Return tensor[region], without a new view if that is all of it."""
    return tensor if region == slice(0, tensor.numel()) else tensor[region]
