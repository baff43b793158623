"""The gradient of a group: from the parameters' own gradients to this rank's share of their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..comm import NOTHING, Axis, Reduction, regions_of
from ..kernels.sum_of_squares import squares_by_block
from ..offload import PagePool, TransientBuffer
from .exact_sum import NUM_LIMBS, to_limbs
from .group import ShardedGroup
from .host_update import HostUpdate
from .layout import BLOCK_NUMEL
from .staging import Region, Staging


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value that this rank found in a gradient."""

    parameter: str
    rank: int | None  # that produced it; None where only the sum over ranks is known


class GroupGradient:
    """Reduces a group's gradients over the axes of its domain into `shard`, (shard_numel,) of the accumulation dtype.

        param.grad --copy--> slot --reduce-scatter over `states`--> shard --all-reduce over `replicas`--> shard

    Where reductions wait for the accumulation boundary, gradients of earlier microbatches stay full on each rank:
    in `param.grad` where the dtypes agree (see also `accumulate_in_place`), else in `local`, (padded_numel,) of the
    accumulation dtype.
    The sum of squares of the final values is counted on the way, while they are in the cache.

    Replicas that share memory may have one sum for all of them, see `share`. Where the update is made on the host,
    `leave_to` says so: a reduced shard leaves the device then, microbatches are added up on the host, and `shard` is
    there.
    """

    def __init__(
        self,
        group: ShardedGroup,
        reduce_dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        reduces_every_backward: bool,
        on_final: Callable[[], None] | None = None,
    ) -> None:
        """on_final: called when the sum over microbatches and ranks is complete; may use up the gradient."""
        self.group = group
        self.reduce_dtype = reduce_dtype
        self.accumulation_dtype = accumulation_dtype
        self.reduces_every_backward = reduces_every_backward
        self.on_final = on_final
        self.is_tied = bool(group.domain.copies)  # others add to it, and the caller calls `leave` and `count` then
        self.local: Tensor | None = None
        self.shard: Tensor | None = None
        self.square_limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64)
        self.non_finite: NonFinite | None = None
        self._has_local = False
        self._has_shard = False
        self._memory: TransientBuffer | None = None
        self._host: HostUpdate | None = None
        self._on_host: Tensor | None = None  # the sum of the shards that have left
        self._common: Tensor | None = None  # of all replicas
        self._staging: Staging | None = None  # of the backward that runs
        self._early: set[int] = set()  # parameters whose gradients wait for it
        self._is_in_place = False  # `param.grad` are views of the shard

    def share(self, memory: Tensor) -> None:
        """memory: (shard_numel,) of the accumulation dtype, the same on all replicas, from their route.

        Each writes its region of the final sum there, so nobody may change it. Only where nothing is accumulated in the
        shard, and all replicas come to a fence between the last use of a gradient and the next backward.
        """
        self._common = memory

    @property
    def updates_next(self) -> bool:
        """Whether the parameters are updated as soon as the sum is complete, where they are."""
        return self.on_final is not None and self._host is None

    @property
    def held_bytes(self) -> int:
        """This rank's part of the memory that gradients take now, those of the parameters themselves included."""
        shared = 0 if self._common is None else self._common.nbytes // self.group.replica_axis.size
        own = 0 if self.shard is None or self.shard is self._common else self.shard.nbytes
        params = () if self._is_in_place else self.group.params
        of_params = sum(param.grad.nbytes for param in params if param.grad is not None)
        return shared + own + of_params + (0 if self.local is None else self.local.nbytes)

    def leave_to(self, host: HostUpdate) -> None:
        """From now on the final shard is in host memory."""
        self._host = host

    def settle(self) -> None:
        """Returns when what has left the device is there, and counted."""
        if self._host is not None:
            self._host.arrive()

    def reset(self) -> None:
        """Forgets the gradient after an optimizer step."""
        self.square_limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64)
        self.non_finite = None
        self._staging = None
        self._early.clear()
        self._is_in_place = False
        self._has_local = False
        self._has_shard = False
        if self.group.copies_are_shared or self._host is not None:
            self.drop_shard()

    def drop_shard(self) -> None:
        """Gives the shard's memory back: it was used up. In the next forward it is room for activations.

        After a step only where ranks share a host's memory. Elsewhere taking it anew (2 % of a step) comes on top of
        what sending costs; and where nothing is sharded, those who want little memory have chosen another stage.
        """
        self._has_shard = False
        self.shard = None
        if self._memory is not None:
            self._memory.drop()
        if self._host is not None and self._on_host is not None:
            self._host.arrive()
            self._host.give(self._on_host)
            self._on_host = None

    def hand_over(self) -> Tensor | None:
        """The final shard, in memory that the next gradient is not written to; `give_back` is for it."""
        taken, self.shard = self.shard, None
        self._on_host = None
        return taken

    def give_back(self, taken: Tensor) -> None:
        """A shard that was handed over was used up."""
        if self._host is not None:
            self._host.give(taken)

    def accumulate_in_place(self) -> None:
        """Lets autograd add up a step's gradients in the shard itself, where no other rank has a part in them.

        Does nothing elsewhere. Copying them there in the end would cost their bytes in page faults, 4 % of a step.
        """
        is_alone = self.group.state_axis.size == self.group.replica_axis.size == 1
        if is_alone and self._host is None and self.accumulation_dtype == self.group.dtype:
            shard = self._open_shard().zero_()
            for slot, param in zip(self.group.layout.slots, self.group.params, strict=True):
                param.grad = shard[slot.offset_in_flat : slot.end_in_flat].view(slot.shape)
            self._is_in_place = True

    def take_early(self, index: int, boundary: bool) -> None:
        """The gradient of parameter `index` is there, in the backward of a group whose turn to be reduced is next.

        Stages it right away, unless that would wait for other ranks or change a rounding; else `collect` does later.
        """
        if self._staging is None and not self._may_stage_early(boundary):
            return
        self._early.add(index)  # once, however often it comes: autograd adds it up
        staging = self._early_staging(boundary)
        if staging is not None:
            while self._early:
                staging.take(self._early.pop())

    def place_for(self, index: int, boundary: bool) -> Tensor | None:
        """Memory for the gradient of parameter `index`, which is about to be made, in such a backward; see `Staging`.

        None where `take_early` would not stage it.
        """
        staging = self._early_staging(boundary)
        return None if staging is None else staging.place(index)

    def collect(self, boundary: bool) -> Iterator[Reduction]:
        """Takes the gradients of one backward pass and reduces them, step by step: a step for each `next`.

        The first step stages them and frees `param.grad`; each later one takes the reduction that was given on.
        """
        if not boundary and self._is_in_place:
            return
        if not boundary and not self.reduces_every_backward:
            self._keep_local()
            return
        what = f"reduction of {self.group.name}"
        shard_axis, replica_axis = self.group.state_axis, self.group.replica_axis
        axis, slot = self._staging_axis(boundary), None
        if axis is not None:
            slot = axis.route.open_slot(self.group.layout.padded_numel, self.reduce_dtype, what)
        staging, self._staging = self._staging or self._open_staging(axis, slot), None
        self._early.clear()
        staging.finish()
        self._is_in_place = False
        shard, accumulate = self._open_shard(), self._has_shard
        counts = boundary and self._host is None
        if slot is None:
            if replica_axis.size == 1:
                self._inspect(shard_axis, counts, 0, shard, (shard,))
        elif axis is shard_axis:
            held = self._held(shard_axis, slot, shard)
            inspect = partial(self._inspect, shard_axis, counts and replica_axis.size == 1)
            moved = shard_axis.route.reduce_scatter(slot, shard, accumulate, held, what, inspect)
            if replica_axis.size > 1 and boundary:  # its last phase goes on to open a slot there
                moved.also_needs(lambda: replica_axis.route.next_slot(shard.numel(), self.reduce_dtype) is not None)
            yield from _steps(moved)
        if replica_axis.size > 1 and boundary:
            if axis is not replica_axis:
                slot = replica_axis.route.open_slot(shard.numel(), self.reduce_dtype, what)
                slot.copy_(shard)
            assert slot is not None
            held = self._held(replica_axis, slot, shard)
            inspect = partial(self._inspect, replica_axis, counts)
            yield from _steps(replica_axis.route.all_reduce(slot, shard, held, what, inspect))
        self._has_shard = True
        if not self.is_tied and (boundary or replica_axis.size == 1):
            self.leave(boundary)
        if boundary and self.on_final is not None:
            self.settle()
            self.on_final()

    def leave(self, is_final: bool) -> None:
        """The reduced shard goes from the device to the host, if `leave_to` was called."""
        if self._host is not None and self.shard is not None:
            self._on_host = self._host.take(self.shard, self._on_host, self._count_on_host if is_final else None)
            self._has_shard = False
            self.shard = self._on_host if is_final else None

    def count(self) -> None:
        """Adds the shard to the norm, where it has changed since it was reduced: each element on one replica."""
        axis, shard = self.group.replica_axis, self.shard
        assert shard is not None
        region = regions_of(shard.numel(), axis.size)[axis.rank]
        squares = squares_by_block(shard[region], BLOCK_NUMEL)
        if bool(torch.isfinite(squares).all()):
            self.square_limbs += to_limbs(squares).to(self.square_limbs.device)
        else:
            self._trace(axis, region.start, shard[region], ())

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _open_shard(self) -> Tensor:
        if self.shard is None or self.shard is self._on_host:
            numel, device = self.group.layout.shard_numel, self.group.full.device
            if self._common is not None and not self.is_tied:
                self.shard = self._common
            elif self._host is not None:  # one that has left may still be on its way
                self.shard = torch.empty(numel, dtype=self.accumulation_dtype, device=device)
            elif device.type == "cpu" and PagePool.is_possible():
                self._memory = self._memory or TransientBuffer(numel, self.accumulation_dtype)
                self.shard = self._memory.tensor
            else:
                self.shard = torch.zeros(numel, dtype=self.accumulation_dtype, device=device)
        return self.shard

    def _count_on_host(self) -> None:
        if not self.is_tied and self.non_finite is None:
            self.count()

    def _keep_local(self) -> None:
        if not self._has_shard:
            self.drop_shard()  # full gradients lie elsewhere until the boundary
        if self.accumulation_dtype == self.group.dtype:
            return  # autograd accumulates in param.grad itself
        if self.local is None:
            numel = self.group.layout.padded_numel
            self.local = torch.zeros(numel, dtype=self.accumulation_dtype, device=self.group.full.device)
        Staging(self.group, [(0, self.local.numel(), self.local)], adds=self._has_local).finish()
        self._has_local = True

    def _staging_axis(self, boundary: bool) -> Axis | None:
        """The axis in whose slot a backward's gradients are staged; None: they go into the shard."""
        if self.group.state_axis.size > 1:
            return self.group.state_axis
        replica_axis = self.group.replica_axis
        return replica_axis if replica_axis.size > 1 and boundary and not self._has_shard else None

    def _may_stage_early(self, boundary: bool) -> bool:
        """True where the gradient is reduced after this backward, and a part that comes twice is added exactly."""
        if self._has_local or not (boundary or self.reduces_every_backward):
            return False
        if self._staging_axis(boundary) is None:
            return not self._has_shard
        return torch.promote_types(self.reduce_dtype, self.group.dtype) == self.reduce_dtype

    def _early_staging(self, boundary: bool) -> Staging | None:
        """The staging of the backward that runs, begun now if it can be."""
        if self._staging is None and self._may_stage_early(boundary):
            axis = self._staging_axis(boundary)
            slot = None if axis is None else self._next_slot(axis)
            if axis is None or slot is not None:  # else the next gradient may find a slot
                self._staging = self._open_staging(axis, slot)
        return self._staging

    def _next_slot(self, axis: Axis) -> Tensor | None:
        return axis.route.next_slot(self.group.layout.padded_numel, self.reduce_dtype)

    def _open_staging(self, axis: Axis | None, slot: Tensor | None) -> Staging:
        """To the shard, or to the slot of `axis` but for what this rank itself sums in place."""
        shard, numel = self._open_shard(), self.group.layout.padded_numel
        regions: list[Region] = [(0, numel, shard if slot is None else slot)]
        if axis is not None and slot is not None:
            held, own = self._held(axis, slot, shard), regions_of(numel, axis.size)[axis.place]
            memory = shard if axis is self.group.state_axis else shard[own]
            start, end = own.start + held.start, own.start + held.stop
            regions = [(0, start, slot[:start]), (start, end, memory[held]), (end, numel, slot[end:])]
        adds = slot is None and self._has_shard
        if self._has_local:
            assert self.local is not None
            for start, end, memory in regions:
                memory.add_(self.local[start:end]) if adds else memory.copy_(self.local[start:end])
            self._has_local, adds = False, True
        return Staging(self.group, regions, adds)

    def _held(self, axis: Axis, slot: Tensor, shard: Tensor) -> slice:
        """What of its own region this rank need not put into its slot.

        On the replica axis whole parameters, which then lie in one piece and can be made there (see `place_for`); on
        the shard axis, where memory counts more, all of it, so that less of the slot is ever touched.
        """
        if not axis.route.sums_in_place or slot.dtype != shard.dtype:
            return NOTHING
        own = regions_of(slot.numel(), axis.size)[axis.place]
        is_staged_there = axis is self._staging_axis(boundary=True)
        if is_staged_there and self._has_shard:
            return NOTHING
        if axis is self.group.state_axis or not is_staged_there:  # or: summed over the other axis, in the shard
            return slice(0, own.stop - own.start)
        start, end = self.group.layout.whole_parameters(own.start, own.stop)
        return slice(start - own.start, end - own.start) if start < end else NOTHING

    def _inspect(self, axis: Axis, counts: bool, offset: int, total: Tensor, contributions: Sequence[Tensor]) -> None:
        """Adds the squares of what was summed here to the norm, and traces a non-finite value to its rank."""
        squares = squares_by_block(total, BLOCK_NUMEL)
        if not bool(torch.isfinite(squares).all()):
            self._trace(axis, offset, total, contributions)
            return
        if counts and not self.is_tied:
            self.square_limbs += to_limbs(squares).to(self.square_limbs.device)

    def _trace(self, axis: Axis, offset: int, total: Tensor, contributions: Sequence[Tensor]) -> None:
        bad = torch.nonzero(~torch.isfinite(total))
        if self.non_finite is not None or not len(bad):
            return
        index = int(bad[0])
        name = self.group.layout.slot_at(self.group.own.start + offset + index).name
        own = axis.rank if axis.rank < len(contributions) else None
        in_place = own is not None and contributions[own].data_ptr() == total.data_ptr()
        producers = [
            rank
            for index_on_axis, (rank, part) in enumerate(zip(axis.ranks, contributions, strict=False))
            if not (in_place and index_on_axis == own) and not torch.isfinite(part[index])
        ]
        if in_place and not producers:
            producers = [axis.ranks[axis.rank]]  # its own contribution has become the sum; nobody else's was bad
        self.non_finite = NonFinite(name, producers[0] if producers else None)


def _steps(reduction: Reduction) -> Iterator[Reduction]:
    yield reduction
    while not reduction.advance():
        yield reduction
