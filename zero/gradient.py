"""The gradient of a group: from the parameters' own gradients to this rank's share of their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..comm import Axis, Pending, regions_of
from .accumulation import HostSum, LocalSum, ShardMemory, Staging
from .codec import Codec
from .group import ShardedGroup
from .host_update import HostUpdate
from .low_rank import LowRank, LowRankMove
from .move import Inspection, Move, NonFinite


class GroupGradient:
    """Reduces a group's gradients over the axes of its domain into `shard`, (shard_numel,) of the accumulation dtype.

        param.grad --Staging--> message --Move--> shard
             |                                     |  |
         LocalSum, of earlier microbatches   ShardMemory, HostSum

    Three parts: microbatches are added up (`accumulation.py`), a sum is moved between ranks (`move.py`), and what is
    summed is inspected on the way, while it is in the cache (same file). Where reductions wait for the
    accumulation boundary, gradients of earlier microbatches stay full on each rank; else the shards are added up.
    Where the update is made on the host, a reduced shard leaves the device, and `shard` is on the host in the end.
    """

    def __init__(
        self,
        group: ShardedGroup,
        levels: Sequence[Codec],
        replicas: Codec,
        accumulation_dtype: torch.dtype,
        reduces_every_backward: bool,
        common: Tensor | None = None,
        is_handed_over: bool = False,
        host: HostUpdate | None = None,
        keeps_sum: bool = True,
        low_rank: LowRank | None = None,
    ) -> None:
        """levels, replicas: as of `Move`. common, is_handed_over: as of `ShardMemory`. keeps_sum: as of `LocalSum`.

        host: where the update is made, if not where parameters are. low_rank: how what is moved is made smaller.
        """
        self.group = group
        self.accumulation_dtype = accumulation_dtype
        self.reduces_every_backward = reduces_every_backward
        self.shard: Tensor | None = None
        self.used: set[int] = set()
        """Parameters of the group that got a gradient on this rank, in any backward of the step so far."""
        self.inspection = Inspection(group)
        self._move = Move(group, levels, replicas, accumulation_dtype, self.inspection)
        if low_rank is not None:
            self._move = LowRankMove(group, levels, replicas, accumulation_dtype, self.inspection, low_rank)
        self._local = LocalSum(group, accumulation_dtype, keeps_sum)
        self._memory = ShardMemory(group, accumulation_dtype, common, is_handed_over or host is not None)
        self._host = None if host is None else HostSum(host)
        self._has_shard = False  # of earlier microbatches
        self._is_final = False  # of all of a step; another backward may still add to it
        self._staging: Staging | None = None  # of the backward that runs
        self._early: set[int] = set()  # parameters whose gradients wait for it
        self._is_in_place = False  # `param.grad` are views of the shard

    @property
    def takes_each(self) -> bool:
        """Whether each backward takes gradients out of `param.grad`, and not the last of a step alone."""
        return self.reduces_every_backward or self._local.is_flat

    @property
    def sums_each(self) -> bool:
        """Whether a rank has a part of the sum over ranks after each backward, and not the last of a step alone."""
        axes = self.group.axes
        return axes.replicas.size == 1 and (self.reduces_every_backward or axes.states.size == 1)

    @property
    def leaves_device(self) -> bool:
        """Whether it is updated with on the host, and made elsewhere."""
        return self._host is not None

    def sum_if(self, sums: Callable[[], bool]) -> None:
        """Sums over ranks that share nothing but data are made only in steps of which `sums` says so."""
        self._move.sums = sums

    @property
    def low_rank(self) -> LowRankMove | None:
        """What sends it as thin matrices, if it is sent so."""
        return self._move if isinstance(self._move, LowRankMove) else None

    def held(self) -> Iterator[Tensor]:
        """Tensors that `held_bytes` counts and that operations of a step make."""
        kept = () if self.low_rank is None else self.low_rank.held()
        tensors = (self.shard, self._local.flat, *(param.grad for param in self.group.params), *kept)
        return (one for one in tensors if one is not None)

    @property
    def held_bytes(self) -> int:
        """This rank's part of the memory that gradients take now, those of the parameters themselves included."""
        params = () if self._is_in_place else self.group.params
        of_params = sum(param.grad.nbytes for param in params if param.grad is not None)
        kept = 0 if self.low_rank is None else self.low_rank.nbytes
        return self._memory.nbytes(self.shard) + of_params + self._local.nbytes + kept

    @property
    def non_finite(self) -> NonFinite | None:
        """The first non-finite value that was found. Where the device was not waited for, this does."""
        return self.inspection.first(self.shard, is_own=not self.group.axes.is_tied)

    def check(self) -> bool:
        """Whether all of it is finite. Remembers what is not, whatever becomes of the shard. Waits for the device."""
        if self.inspection.is_finite:
            return True
        self.inspection.first(self.shard, is_own=not self.group.axes.is_tied)
        return False

    def remember(self) -> None:
        """As `check`, before the shard goes, but without waiting for a device: `inspection.is_bad` has what it says."""
        if self.shard is not None:
            self.inspection.remember(self.shard, is_own=not self.group.axes.is_tied)

    def clear(self, cleared: Mapping[int, bool]) -> None:
        """Final gradients become zero, or none. cleared: identity of a parameter -> whether it has none."""
        self.settle()
        for index, param in enumerate(self.group.params):
            if id(param) in cleared:
                for piece in self.group.pieces.of(index):
                    assert self.shard is not None
                    self.shard[piece.offset_in_shard : piece.offset_in_shard + piece.numel].zero_()
                self.mark_changed(index, is_used=index in self.used and not cleared[id(param)])

    def so_far(self, index: int, dtype: torch.dtype, is_complete: bool) -> tuple[Tensor, bool]:
        """This rank's term of the gradient of parameter `index`, flat, and whether anything has used it here.

        The sum over the ranks of the group's domain is that of the step's backwards. is_complete: the last one was.
        """
        slot, param = self.group.layout.slots[index], self.group.params[index]
        found = torch.zeros(slot.numel, dtype=dtype, device=self.group.full.device)
        has_final = self.group.axes.replicas.rank == 0 or not self._move.sums()  # of a sum that others have too
        sums = [self.shard] if self._has_shard and (has_final or not self._is_final) else []
        if self._host is not None and has_final:
            self._host.arrive()
            sums.append(self._host.total)
        for piece in self.group.pieces.of(index):
            for total in sums:
                if total is not None:
                    part = total[piece.offset_in_shard : piece.offset_in_shard + piece.numel]
                    found[piece.offset_in_param : piece.offset_in_param + piece.numel] += part.to(found.device)
        if self._local.has_values and self._local.flat is not None:
            found += self._local.flat[slot.offset_in_flat : slot.end_in_flat]
        arrived = None if is_complete or self.takes_each else param.grad  # else it is a stand-in
        if arrived is not None:
            found += arrived.reshape(-1)
        return found, arrived is not None or index in self.used

    def settle(self) -> None:
        """Returns when what has left the device is there, and all is counted."""
        if self._host is not None:
            self._host.arrive()
        if self.inspection.is_outdated:
            self.inspection.forget()
            self._count()

    def mark_changed(self, index: int, is_used: bool) -> None:
        """The caller has set the final gradient of parameter `index`. is_used: it is one, and not none."""
        self.inspection.is_outdated = True
        if is_used:
            self.used.add(index)
        else:
            self.used.discard(index)

    def clamp(self, bound: float) -> None:
        """Makes the elements of the final sum at most `bound`, and at least -bound."""
        if self.shard is not None:
            self.shard.clamp_(-bound, bound)
            self.inspection.is_outdated = True

    def reset(self) -> None:
        """Forgets the gradient after an optimizer step."""
        self.inspection.forget()
        if self._move.has_steps:
            self._move.reset()
        self.used.clear()
        self._staging = None
        self._early.clear()
        self._is_in_place = False
        self._local.has_values = False
        self._has_shard = self._is_final = False
        is_sent_in_parts = self.group.axes.states.size > 1 and not self.group.axes.copies_are_shared
        if not is_sent_in_parts or self._host is not None or self.group.full.device.type != "cpu":
            self.drop_shard()

    def drop_shard(self) -> None:
        """Gives the shard's memory back: it was used up. In the next forward it is room for activations.

        Not after a step where each rank is sent its part of the sum: taking it anew (1 to 2 % of a step) comes on top
        of what sending costs there, and it is a rank's share of all.
        """
        self._has_shard = False
        self.shard = None
        self._memory.drop()
        if self._host is not None:
            self._host.drop()

    def hand_over(self) -> Tensor | None:
        """The final shard, in memory that the next gradient is not written to; `give_back` is for it."""
        taken, self.shard = self.shard, None
        if self._host is not None:
            self._host.hand_over()
        return taken

    def give_back(self, taken: Tensor) -> None:
        """A shard that was handed over was used up."""
        if self._host is not None:
            self._host.give_back(taken)

    def accumulate_in_place(self) -> None:
        """Lets autograd add up a step's gradients in the shard itself, where no other rank has a part in them.

        Does nothing elsewhere. Copying them there in the end would cost their bytes in page faults, 4 % of a step.
        """
        is_alone = self.group.axes.states.size == self.group.axes.replicas.size == 1
        if is_alone and self._host is None and self.accumulation_dtype == self.group.plan.dtype:
            shard = self._open_shard().zero_()
            for slot, param in zip(self.group.layout.slots, self.group.params, strict=True):
                # With a count of its own changes, `_version`, that says whether anything was added.
                param.grad = shard[slot.offset_in_flat : slot.end_in_flat].view(slot.shape).data
            self._is_in_place = True

    def take_early(self, index: int, boundary: bool) -> None:
        """The gradient of parameter `index` is there, in the backward of a group whose turn to be reduced is next.

        Stages it right away, unless that would wait for other ranks or change a rounding; else `collect` does later.
        """
        if self.group.params[index].grad is None:  # frozen since its forward: autograd tells of it, and adds nothing
            return
        self._early.add(index)  # once, however often it comes: autograd adds it up
        staging = self._staging or self._early_staging(boundary)
        if staging is not None:
            staging.take(self._early)
            self._early.clear()

    def place_for(self, index: int, boundary: bool) -> Tensor | None:
        """Memory for the gradient of parameter `index`, which is about to be made, in such a backward; see `Staging`.

        None where `take_early` would not stage it.
        """
        staging = self._staging or self._early_staging(boundary)
        return None if staging is None else staging.place(index)

    def collect(self, boundary: bool) -> Iterator[Pending]:
        """Takes the gradients of one backward pass and reduces them, step by step: a step for each `next`.

        The first step stages them and frees `param.grad`; each later one waits for what the one before it has given.
        """
        self._early.clear()
        if not boundary and self._is_in_place:
            return
        if not boundary and not self.reduces_every_backward:
            if not self._has_shard:
                self.drop_shard()  # full gradients lie elsewhere until the boundary
            self.used |= self._local.add()
            return
        if self._is_final:
            self._reopen()
        axis = self._move.staging_axis(boundary, self._has_shard)
        message = None if axis is None else self._move.open_message(axis, self._has_shard)
        staging, self._staging = self._staging or self._open_staging(axis, message), None
        if self._is_in_place:
            self._drop_untouched()
        self.used |= staging.finish()
        self._is_in_place = False
        counts = boundary and self._host is None and not self.group.axes.is_tied and self.group.axes.is_counted
        assert self.shard is not None
        yield from self._move.sum(axis, message, self.shard, self._has_shard, boundary, counts)
        self._has_shard, self._is_final = True, boundary
        if self._host is not None and not self.group.axes.is_tied and (boundary or self.group.axes.replicas.size == 1):
            self._leave(boundary)

    def replace(self, total: Tensor) -> None:
        """The final shard of a tied weight: the sum over its copies, (shard_numel,)."""
        assert self.shard is not None
        self.inspection.remember(self.shard, is_own=True)  # while it can be seen whose it is
        self.shard.copy_(total)
        self._count()
        self._leave(is_final=True)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Another backward adds to a final sum: where it is over replicas, that is the first one's from now on."""
        self.settle()
        self.inspection.count_anew()
        self._is_final = False
        replica = self.group.axes.replicas.rank
        if self.group.axes.replicas.size == 1 or not self._has_shard:
            return
        assert self.shard is not None
        if self.group.axes.states.size > 1:
            if replica:
                self.shard.zero_()
            return
        if replica == 0 or not self._move.sums():  # else the shard may be one that all replicas write to
            self._local.take_back(self.shard)
        self._has_shard = False

    def _drop_untouched(self) -> None:
        """What nothing was added to is no gradient."""
        for param in self.group.params:
            if param.grad is not None and param.grad._version == 0:
                param.grad = None

    def _open_shard(self) -> Tensor:
        if self.shard is None or (self._host is not None and self._host.has(self.shard)):
            self.shard = self._memory.take()
        return self.shard

    def _leave(self, is_final: bool) -> None:
        """The reduced shard goes from the device to the host, if that updates."""
        if self._host is not None and self.shard is not None:
            counts = is_final and not self.group.axes.is_tied
            total = self._host.add(self.shard, self._count if counts else None)
            self._has_shard = False
            self.shard = total if is_final else None

    def _count(self) -> None:
        """Adds the final shard to the norm, where it has changed since it was reduced: each element on one rank."""
        if not self.group.axes.is_counted:
            return
        axis, shard = self.group.axes.replicas, self.shard
        assert shard is not None
        region = regions_of(shard.numel(), axis.size)[axis.rank] if self._move.sums() else slice(0, shard.numel())
        self.inspection.look(axis, region.start, shard[region], (), counts=True)

    def _early_staging(self, boundary: bool) -> Staging | None:
        """The staging of the backward that runs, begun now if it can be; else the next gradient may find that it can.

        It can where the gradient is reduced after this backward, and a part that comes twice is added exactly.
        """
        if self._local.has_values or not (boundary or self.reduces_every_backward):
            return None
        axis = self._move.staging_axis(boundary, self._has_shard)
        if axis is None:
            if not self._has_shard:
                self._staging = self._open_staging(None, None)
        elif self._move.adds_exactly:
            message = self._move.next_message(axis, self._has_shard)
            if message is not None:
                self._staging = self._open_staging(axis, message)
        return self._staging

    def _open_staging(self, axis: Axis | None, message: Tensor | None) -> Staging:
        places = self._move.places(axis, message, self._open_shard(), self._has_shard)
        adds = message is None and self._has_shard
        if self._local.has_values:
            self._local.pour(places, adds)
            adds = True
        return Staging(self.group, places, adds)
