"""The way of a full gradient from each rank to the shards of its sum."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor

from ..comm import Axis, Pending, regions_of
from .accumulation import Region
from .codec import NOTHING, Codec, Coming
from .group import ShardedGroup
from .inspection import Inspection


class Move:
    """Sums a group's gradient over the ranks of its domain: a codec for each axis.

        staged --copy--> message --reduce-scatter over `states`--> shard --all-reduce over `replicas`--> shard

    The sum over `states` may be made in levels: over ranks of a host first, and of hosts then. What is not yet the sum
    of all lies in memory of its own between them.

    What a rank has for its own part of the sum need not be in its message: it is summed where it was staged. Where the
    route looks for it there too, the message has no room for it.
    """

    def __init__(
        self,
        group: ShardedGroup,
        levels: Sequence[Codec],
        replicas: Codec,
        dtype: torch.dtype,
        inspection: Inspection,
    ) -> None:
        """levels: of the sum over the ranks among which states are divided. replicas: over these. dtype: of the sum."""
        self._group = group
        self._dtype = dtype
        self._levels = levels
        self._replicas = replicas
        self._stager = levels[0] if group.axes.states.size > 1 else replicas  # in whose message a gradient is staged
        self._counting = [codec for codec in (*levels, replicas) if codec.counts_messages]
        self.has_steps = bool(self._counting)
        """Whether `reset` has something to do."""
        self._inspection = inspection
        self._name = f"reduction of {group.plan.name}"
        self.sums: Callable[[], bool] = lambda: True
        """Whether gradients are summed over replicas in this step; else each updates with its own, and counts it."""

    def staging_axis(self, boundary: bool, has_shard: bool) -> Axis | None:
        """The axis in whose message a backward's gradients are staged; None: they go into the shard."""
        if self._group.axes.states.size > 1:
            return self._group.axes.states
        replica_axis = self._group.axes.replicas
        return replica_axis if replica_axis.size > 1 and boundary and not has_shard and self.sums() else None

    @property
    def adds_exactly(self) -> bool:
        """Whether a gradient that comes to a message in two parts has the bits of one that autograd has added up."""
        return self._levels[0].is_exact(self._group.plan.dtype)

    def reset(self) -> None:
        """The next gradient is of another step."""
        for codec in self._counting:
            codec.reset()

    def next_message(self, axis: Axis, has_shard: bool) -> Tensor | None:
        """What `open_message` will give, to be written already; None where it is not free yet."""
        lacks = self._not_there(axis, has_shard) if axis.route.slots_may_lack_own else 0
        return self._stager.next_message(self._group.layout.padded_numel - lacks)

    def open_message(self, axis: Axis, has_shard: bool) -> Tensor:
        """Memory to stage the next gradient in, (padded_numel,), or without the part of it that is summed in place;
        may wait for other ranks."""
        lacks = self._not_there(axis, has_shard) if axis.route.slots_may_lack_own else 0
        return self._stager.open_message(self._group.layout.padded_numel - lacks, self._name)

    def _not_there(self, axis: Axis, has_shard: bool) -> int:
        """Elements for which a message of `axis` has no room: what is summed in place."""
        held = self._held(axis, has_shard)
        num_held: int = held.stop - held.start
        return num_held

    def places(self, axis: Axis | None, message: Tensor | None, shard: Tensor, has_shard: bool) -> list[Region]:
        """Where gradients are staged: the shard, or the message of `axis` but for what is summed in place."""
        numel = self._group.layout.padded_numel
        if axis is None or message is None:
            return [(0, numel, shard)]
        held = self._held(axis, has_shard)
        if held == NOTHING:
            return [(0, numel, message)]
        own = regions_of(numel, axis.size)[axis.place]
        memory = shard if axis is self._group.axes.states else shard[own]
        start, end = own.start + held.start, own.start + held.stop
        behind = message[message.numel() - (numel - end) :]
        return [(0, start, message[:start]), (start, end, memory[held]), (end, numel, behind)]

    def sum(
        self, axis: Axis | None, message: Tensor | None, shard: Tensor, has_shard: bool, boundary: bool, counts: bool
    ) -> Iterator[Pending]:
        """Sums what was staged, step by step: each `next` after what it has given would not wait, or shall.

        shard: (shard_numel,), which has the sum of earlier microbatches, if any. boundary: it becomes that of all
        ranks. counts: its squares are counted then.
        """
        states, replicas = self._group.axes.states, self._group.axes.replicas
        is_last = replicas.size == 1 or not self.sums()
        if message is None and is_last and boundary:  # what was not finite before still is not
            self._inspection.look(states, 0, shard, (), counts)
        if axis is states and message is not None:
            for codec in self._levels[:-1]:
                message = yield from self._sum_first(codec, message)
            held = self._held(axis, has_shard)
            coming = self._levels[-1].reduce_scatter(message, None if has_shard else shard, self._name)
            if boundary and not is_last:  # what follows at once opens a message there
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
            held = held if self._replicas.may_lack_own(self._dtype) else NOTHING
        coming = self._replicas.all_reduce(message, shard, self._name)
        yield from self._add_up(replicas, coming, mine, shard, held, False, counts)

    def _sum_first(self, codec: Codec, message: Tensor) -> Generator[Pending, None, Tensor]:
        """A level that is not the last. Returns its sum, which is staged for the next one."""
        coming = codec.reduce_scatter(message, None, self._name)
        yield coming.arrived
        coming.arrived.wait()
        numel = coming.region.stop - coming.region.start
        total = torch.empty(numel, dtype=self._dtype, device=message.device)
        coming.add_up(total, NOTHING, False)
        coming.summed()
        return total

    def _when_free(self, pending: Pending, numel: int) -> Pending:
        """As `pending`, but not done before the next message to replicas is free."""
        return Pending(pending.wait, lambda: pending.is_done and self._replicas.next_message(numel) is not None)

    def _held(self, axis: Axis, has_shard: bool) -> slice:
        """What of its own region this rank need not put into the message that it stages in.

        All of it where the message is smaller by that, and on the shard axis, where memory counts more. Else whole
        parameters, which then lie in one piece and can be made there (see `Staging.place`).
        """
        if has_shard or not axis.route.sums_here:
            return NOTHING
        is_one_sum = axis is self._group.axes.replicas or len(self._levels) == 1
        if not is_one_sum or not self._stager.may_lack_own(self._dtype):
            return NOTHING
        own = regions_of(self._group.layout.padded_numel, axis.size)[axis.place]
        if axis is self._group.axes.states or axis.route.slots_may_lack_own:
            return slice(0, own.stop - own.start)
        start, end = self._group.layout.whole_parameters(own.start, own.stop)
        return slice(start - own.start, end - own.start) if start < end else NOTHING

    def _add_up(
        self, axis: Axis, coming: Coming, mine: slice, shard: Tensor, held: slice, accumulate: bool, counts: bool
    ) -> Iterator[Pending]:
        """mine: what this rank looks at, of what is then the same on all ranks of the axis."""
        yield coming.arrived
        coming.arrived.wait()
        of_ranks = coming.add_up(_part(shard, coming.region), held, accumulate)
        self._inspection.look(axis, mine.start, _part(shard, mine), of_ranks, counts)
        spread = coming.summed()
        if spread is not None:
            yield spread
            spread.wait()


def _part(tensor: Tensor, region: slice) -> Tensor:
    """Itself, where that is all of it."""
    return tensor if region == slice(0, tensor.numel()) else tensor[region]
