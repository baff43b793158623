"""A flat buffer of parameters, sharded over ranks as its domain says; and its memory, which comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from ..comm import Mesh, Pending
from ..offload import Memory, PagedBuffer, Resident, StoredRange, bytes_in_memory
from .autograd import untransformed
from .codec import WeightCodec
from .domain import DomainAxes
from .layout import Piece, Pieces
from .placement import ShardRest
from .plan import GroupPlan
from .released import mark_present, mark_released


class Residence(Enum):
    """Which memory a group holds."""

    FULL = "full"  # `full` holds all parameters, which are views of it
    COMING = "coming"  # as FULL, but their values are still on their way, and parameters raise when they are read
    LOADING = "loading"  # as COMING, but the shard comes from its store first: see `continue_gather`
    SHARDED = "sharded"  # only `shard` has values; parameters raise when they are read


class ShardedGroup:
    """Parameters of one unit with the same dtype and role, flat and sharded.

    Parameters are views into `full`, (padded_numel,), for good: what autograd saved of them (a transposed view, say)
    refers to the storage of `full`. Releasing takes the memory away from that storage, gathering gives it back and
    fills it in place, so that those views are right again in backward.

    | memory of `full`          | `shard`          | gather               | release                     |
    |---------------------------|------------------|----------------------|-----------------------------|
    | kept (stage 0, 1, 2)      | a view of `full` | from the other ranks | never                       |
    | one copy per host         | a view of `full` | nothing moves        | only the names are taken    |
    | freed by pages (3, CPU)   | a view of `full` | from the other ranks | the others' parts' pages go |
    | freed as a whole (3)      | of its own       | from the other ranks | storage resized to 0        |
    | offloaded (3)             | in a store       | load, then as above  | as above, and the shard's   |

    Where states are divided over more axes than parameters are (hpZ), the shard is a part of what stays, and `refresh`
    brings the other parts of that after an update.

    Where weights lose something on their way (`WeightCodec.is_exact`), `full` has on all ranks what has come, the
    rank's own part too, and the shard has memory of its own: it alone is exact.
    """

    def __init__(self, plan: GroupPlan, mesh: Mesh, codec: WeightCodec) -> None:
        """codec: of what goes to other ranks."""
        self.plan = plan
        """Of the same parameters another one, from when on something else becomes of them."""
        self.params = [param for _, param in plan.params]
        self.layout = plan.layout
        self.axes = DomainAxes(mesh, plan.domain)
        self._codec = codec
        self.residence = Residence.FULL
        self.full = torch.empty(0)
        self.shard = torch.empty(0)
        self.resident = Resident(plan.name, lambda: self.shard)
        """The shard, for a window that brings it to where it is updated."""
        self._pending = _NOTHING_PENDING  # of the last gather
        self.keeper: Callable[[], bool] | None = None
        """Says whether it is kept full, whatever is released."""
        self._memory = GroupMemory(self.full, self.shard)
        self._rest: ShardRest | None = None
        are_apart = self.axes.parameters.size > 1 and not self.axes.copies_are_shared
        self.frees_memory = bool(plan.domain.parameters) and are_apart
        """True where a release gives memory back, and a gather needs the other ranks."""
        # Of each parameter the same two tensors each time, which take no memory of their own.
        self._views: list[Tensor] = []  # of the flat buffer
        self._without_values: list[Tensor] = []  # a NaN in the shape of each parameter

    @property
    def full_bytes(self) -> int:
        """Bytes that `full` takes now."""
        held = self.layout.padded_numel * self.plan.dtype.itemsize
        if not self.frees_memory or self.residence is not Residence.SHARDED:
            return held
        if not self._memory.own_is_in_full:
            return 0
        has_own = self._rest is None or self._rest.window.holds(self.resident)
        return bytes_in_memory(self._memory.own) if has_own else 0

    def held_at_rest(self) -> Iterator[Tensor]:
        """What is in memory of parameters that nobody uses, where that is another memory than of those in use."""
        if self.frees_memory and self.residence is Residence.SHARDED and self._rest is None:
            yield from (self._memory.own, self.shard)

    @property
    def bytes_beside(self) -> int:
        """Bytes that what rests here takes, where it is no part of `full`."""
        memory = {
            one.data_ptr(): one.nbytes() for one in (self._memory.own.untyped_storage(), self.shard.untyped_storage())
        }
        memory.pop(self.full.untyped_storage().data_ptr(), None)
        return sum(memory.values())

    @cached_property
    def pieces(self) -> Pieces:
        """What this rank's shard holds."""
        return self.layout.pieces(self.axes.states.place)

    def adopt(self, full: Tensor) -> None:
        """Takes the buffer that the route allocated, (padded_numel,) of `dtype`, zero-filled, and keeps its memory."""
        assert full.numel() == self.layout.padded_numel and full.dtype == self.plan.dtype
        self.full = full
        self._memory = GroupMemory(full, full[self.at_rest])
        self.shard = full[self.own] if self._codec.is_exact else torch.zeros_like(full[self.own])

    def adopt_memory(self, memory: GroupMemory, rest: ShardRest | None = None) -> None:
        """Takes addresses for all parameters, with memory for what is at rest alone, all zero.

        rest: the shard is there whenever the group is not full.
        """
        self._memory, self._rest = memory, rest
        self.frees_memory |= rest is not None
        self.full = memory.full
        self.residence = Residence.SHARDED
        memory.take_own()
        first = self.own.start - self.at_rest.start
        self.shard = self._memory.own[first : first + self.layout.shard_numel]  # torch makes no view without memory
        if self.sends_differences:
            self.shard = torch.zeros_like(self.shard)
        self._memory.own.zero_()
        if rest is None:
            return
        memory.give_own()
        self.resident = rest.resident(self.plan.name, self._take_own, lambda _: memory.give_own())
        rest.window.create(self.resident).zero_()
        rest.window.release(self.resident)
        rest.window.wait()

    @property
    def own(self) -> slice:
        """This rank's part of `full`: what its states are of."""
        numel = self.layout.shard_numel
        return slice(self.axes.states.place * numel, (self.axes.states.place + 1) * numel)

    @property
    def at_rest(self) -> slice:
        """The part of `full` that stays where the others are freed; `own` lies in it."""
        numel = self.layout.padded_numel // self.axes.parameters.size
        return slice(self.axes.parameters.place * numel, (self.axes.parameters.place + 1) * numel)

    def place(self, piece: Piece, values: Tensor) -> None:
        """Writes this rank's piece of one parameter. values: the whole parameter, any shape and dtype."""
        part = values.reshape(-1)[piece.offset_in_param : piece.offset_in_param + piece.numel]
        own = self.own_values(changes=True)
        values_of(own)[piece.offset_in_shard : piece.offset_in_shard + piece.numel].copy_(part)

    def own_values(self, changes: bool = False) -> Memory:
        """This rank's shard, wherever it is. changes: it is for writing."""
        rest = self._rest
        if rest is None:
            return self.shard
        return StoredRange(self.layout.shard_numel, self.plan.dtype, lambda: rest.window.open(self.resident, changes))

    def _take_own(self) -> Tensor:
        self._memory.take_own()
        return self.shard

    def install(self) -> None:
        """Makes the parameters views of `full`, where that is kept; what they were before is given back."""
        untransformed(self._hide if self.frees_memory else self._show)

    # -- full and sharded -----------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Starts to make the parameters full. Does nothing where that was started, or is so."""
        if self.residence is not Residence.SHARDED:
            return
        if self._rest is not None:
            self._rest.window.let_go(self.resident)  # a change is saved now, and not after an update elsewhere
            self._rest.window.prefetch(self.resident)
            self._memory.take_others()
            self.residence = Residence.LOADING
            return
        if self.frees_memory:
            self._memory.take_others()
            self._pending = untransformed(self._exchange)
        self.residence = Residence.COMING

    def continue_gather(self) -> None:
        """Starts what has to wait for the shard to be loaded; a collective then, which `start_gather` was not."""
        if self._rest is not None and self.residence is Residence.LOADING:
            self.residence = Residence.COMING
            self._rest.window.acquire(self.resident)
            self._pending = untransformed(self._exchange)

    def gather(self) -> None:
        """Makes the parameters full."""
        if self.residence is Residence.FULL:
            return
        if self.frees_memory:  # else all is there, and the names alone come back
            self.start_gather()
            self.continue_gather()
            untransformed(self._take_gathered)
        mark_present(self.params)
        self.residence = Residence.FULL

    @property
    def is_loaded(self) -> bool:
        """Whether a gather brings the shard from its store first."""
        return self._rest is not None

    def join_gather(self) -> Pending:
        """Sends this rank's shard to ranks that gather a group which is full here. What comes is there already."""
        return untransformed(self._exchange)

    def park(self) -> None:
        """Hides full parameters, which stay in memory: as COMING, with nothing on its way."""
        untransformed(self._hide)
        self.residence = Residence.COMING

    def release(self, holds_shard: bool = False) -> None:
        """Frees the full parameters; only where the policy frees them at all, and nobody keeps them.

        holds_shard: which else goes back to its store, is updated next.
        """
        if not self.plan.domain.parameters or self.residence is Residence.SHARDED:
            return
        if self.keeper is not None and self.keeper():
            return
        if self.frees_memory:
            if self.residence is not Residence.FULL:  # prefetched, and then not needed
                self.continue_gather()
                untransformed(self._take_gathered)
            untransformed(self._hide)
            self._memory.give_others()
        else:
            mark_released(self.params, self.layout.names)
        self.residence = Residence.SHARDED
        if self._rest is not None and self._rest.window.holds(self.resident):
            self._rest.window.hold(self.resident)
            if not holds_shard:
                self._rest.window.let_go(self.resident)

    def keep(self, as_long_as: Callable[[], bool] = lambda: True) -> None:
        """From now on `release` has no effect while it says so: a rank may use the parameters without the others."""
        self.keeper = as_long_as

    def release_kept(self) -> None:
        """Takes back `keep`, and releases."""
        self.keeper = None
        self.release()

    def refresh(self, is_update: bool = False) -> Pending:
        """Brings updated shards of other ranks to where parameters are at rest, views of which stay as they are.

        is_update: of values there that were brought before; else they come exactly.
        """
        if not self.axes.are_refreshed:
            return _NOTHING_PENDING
        what = f"gather of {self.plan.name}"
        if is_update:
            return self._codec.gather(self.axes.refreshed, self._memory.own, self.shard, what, is_update=True)
        return self.axes.refreshed.route.gather(self._memory.own, self.shard, what)

    @property
    def rests_beside(self) -> bool:
        """Whether a gather puts something else into `full` than what this rank has at rest."""
        return not self.axes.are_refreshed and not self._codec.is_exact

    @property
    def sends_differences(self) -> bool:
        """Whether what an update has changed of this copy loses something on its way."""
        return self.axes.are_refreshed and not self._codec.is_exact

    def make_exact(self) -> None:
        """Full parameters get the very values of all ranks' shards, where they have something else. A collective."""
        assert self.residence is Residence.FULL
        if self._codec.is_exact:
            return
        self.refresh().wait()
        if self.axes.parameters.size > 1:
            route, what = self.axes.parameters.route, f"gather of {self.plan.name}"
            untransformed(lambda: route.gather(self.full, self._memory.own, what).wait())

    def _exchange(self) -> Pending:
        what = f"gather of {self.plan.name}"
        if self.axes.are_refreshed:
            return self.axes.parameters.route.gather(self.full, self._memory.own, what)
        return self._codec.gather(self.axes.parameters, self.full, self._memory.own, what)

    def _take_gathered(self) -> None:
        self._pending.wait()
        self._pending = _NOTHING_PENDING
        self._show()

    def _show(self) -> None:
        """Parameters are views of `full`. Released or not."""
        if not self._views:  # made while there is memory; torch keeps them, whatever becomes of it
            with torch.inference_mode(False):
                self._views = [self.full[s.offset_in_flat : s.end_in_flat].view(s.shape) for s in self.layout.slots]
        self._point(self._views)

    def _hide(self) -> None:
        """Parameters have shapes without values (a NaN, expanded), and raise when they are read."""
        if not self._without_values:
            with torch.inference_mode(False):
                value = torch.nan if self.full.dtype.is_floating_point else 0
                nothing = torch.full((), value, dtype=self.full.dtype, device=self.full.device)
                self._without_values = [nothing.expand(param.shape) for param in self.params]
        self._point(self._without_values)
        mark_released(self.params, self.layout.names)

    def _point(self, values: Sequence[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for param, value in zip(self.params, values, strict=True):
                param.data = value


_NOTHING_PENDING = Pending()


def values_of(memory: Memory) -> Tensor:
    """The values, until those of another stored range are asked for."""
    return memory if isinstance(memory, Tensor) else memory.open()


def part_of(memory: Memory, low: int, high: int) -> Memory:
    """The elements [low, high)."""
    return memory[low:high] if isinstance(memory, Tensor) else memory.part(low, high)


class GroupMemory:
    """Addresses for `full`, (padded_numel,), and for `own`, the part of it that is at rest here; memory for a while.

    Content is arbitrary whenever memory comes. Here it is there for good, and nothing comes or goes.
    """

    own_is_in_full = True
    """Whether `own` is a part of `full`, with the same memory."""

    def __init__(self, full: Tensor, own: Tensor) -> None:
        self.full = full
        self.own = own

    def take_own(self) -> None: ...

    def take_others(self) -> None:
        """Memory for the rest of `full`, beside that of `own`."""

    def give_own(self) -> None:
        """The end of `take_own`."""

    def give_others(self) -> None:
        """The end of `take_others`."""


class PagedMemory(GroupMemory):
    """Pages that move between buffers: [Note: moving pages]. `own` is a view of `full`, or has memory for itself."""

    def __init__(self, pages: PagedBuffer, own: slice, is_beside: bool) -> None:
        """own: which elements. is_beside: all pages come and go, as `full` gets other values than `own`."""
        numel = pages.tensor.numel()
        self.own_is_in_full = not is_beside
        self._pages, self._own = pages, own
        self._others = [(0, numel)] if is_beside else [(0, own.start), (own.stop, numel)]
        super().__init__(pages.tensor, pages.tensor[own])
        if is_beside:
            self.own = torch.empty(own.stop - own.start, dtype=pages.tensor.dtype)
            self.own.untyped_storage().resize_(0)

    def take_own(self) -> None:
        if self.own_is_in_full:
            self._pages.populate(self._own.start, self._own.stop)
        else:
            self.own.untyped_storage().resize_(self.own.nbytes)

    def take_others(self) -> None:
        for start, end in self._others:
            self._pages.populate(start, end)

    def give_own(self) -> None:
        if self.own_is_in_full:
            self._pages.vacate(self._own.start, self._own.stop)
        else:
            self.own.untyped_storage().resize_(0)

    def give_others(self) -> None:
        for start, end in self._others:
            self._pages.vacate(start, end)


class ResizedMemory(GroupMemory):
    """Storages that are resized, on any device. `own` has one for itself, but where it is all of `full`."""

    def __init__(self, full: Tensor, own_numel: int) -> None:
        """full: (padded_numel,), whose memory is given back at once."""
        self.own_is_in_full = own_numel == full.numel()
        own = full if self.own_is_in_full else torch.empty(own_numel, dtype=full.dtype, device=full.device)
        super().__init__(full, own)
        for memory in (self.full, self.own):
            memory.untyped_storage().resize_(0)

    def take_own(self) -> None:
        self.own.untyped_storage().resize_(self.own.nbytes)

    def take_others(self) -> None:
        if not self.own_is_in_full:
            self.full.untyped_storage().resize_(self.full.nbytes)

    def give_own(self) -> None:
        self.own.untyped_storage().resize_(0)

    def give_others(self) -> None:
        if not self.own_is_in_full:
            self.full.untyped_storage().resize_(0)
