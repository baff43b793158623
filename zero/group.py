"""A flat buffer of parameters, sharded over ranks, and the memory that comes and goes with gather and release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property, partial

import torch
from torch import Tensor

from ..comm import Mesh, Pending
from ..offload import Memory, Offloadable, PagedBuffer, StoredRange, bytes_in_memory
from .autograd import untransformed
from .codec import WeightCodec
from .layout import ParamShard, ParamShards
from .placement import ShardStore
from .plan import GroupPlan
from .released import mark_present, mark_released
from .sharding_spec import ShardingAxes


class ShardedState(Enum):
    """The memory that a group holds."""

    UNSHARDED = "full"  # `full` holds the values of all parameters, which are views of it
    UNSHARDING = "coming"  # memory as UNSHARDED; the gather is in flight, and reading a parameter raises
    LOADING = "loading"  # as UNSHARDING, while the store still loads the shard: see `continue_gather`
    SHARDED = "sharded"  # only `shard` has values; reading a parameter raises


class ShardedGroup:
    """Parameters of a unit with the same dtype and role, flat and sharded.

    Parameters are views into `full`, (padded_numel,), for their whole life: tensors that autograd saves (a transposed
    view, say) refer to the storage of `full`. `release` frees the memory of that storage, `gather` takes memory again
    and fills it in place, so saved views are valid again in backward.

    | memory of `full`           | `shard`          | gather               | release                      |
    |----------------------------|------------------|----------------------|------------------------------|
    | kept (stage 0, 1, 2)       | a view of `full` | from all ranks       | never                        |
    | a copy per host            | a view of `full` | moves nothing        | marks parameters as released |
    | freed in pages (3, CPU)    | a view of `full` | from all ranks       | frees pages of remote shards |
    | freed as a whole (3)       | separate         | from all ranks       | resizes the storage to 0     |
    | offloaded (3)              | in a store       | load, then as above  | as above, and the shard      |

    If states are divided over more axes than parameters (hpZ), the shard is a part of the memory that stays, and
    `refresh` gathers the remaining part after an update.

    If the transport quantizes weights (`WeightCodec.is_exact` is False), `full` has the dequantized values on all
    ranks, this rank's part included, and the shard has separate memory: only the shard is exact.
    """

    def __init__(self, plan: GroupPlan, mesh: Mesh, codec: WeightCodec) -> None:
        """codec: encodes weights for the transport."""
        self.plan = plan
        """Replaced when the role of the parameters changes."""
        self.params = [param for _, param in plan.params]
        self.layout = plan.layout
        self.axes = ShardingAxes(mesh, plan.sharding)
        self._codec = codec
        self.sharded_state = ShardedState.UNSHARDED
        self.full = torch.empty(0)
        self.shard = torch.empty(0)
        self.offloadable = Offloadable(plan.name, lambda: self.shard)
        """The shard, for a window that brings it to the memory of the update."""
        self._pending = _NOTHING_PENDING  # pending result of the last gather
        self.keeper: Callable[[], bool] | None = None
        """While it returns True, `release` does nothing."""
        self.returning: Callable[[], object] | None = None
        """Waits until the shard has come back from its update on the host; None: it is here."""
        self._memory = GroupMemory.kept(self.full, self.shard)
        self._shard_store: ShardStore | None = None
        # Ranks that share a copy read the same pages, so a release frees nothing.
        are_apart = self.axes.parameters.size > 1 and not self.axes.copies_are_shared
        self.frees_memory = bool(plan.sharding.parameters) and are_apart
        """True if a release frees memory, so that a gather needs the other ranks."""
        # Made once for each parameter; neither list takes memory.
        self._views: list[Tensor] = []  # of `full`
        self._without_values: list[Tensor] = []  # an expanded NaN in the shape of each parameter

    @property
    def full_bytes(self) -> int:
        """Bytes that `full` takes now."""
        held = self.layout.padded_numel * self.plan.dtype.itemsize
        if not self.frees_memory or self.sharded_state is not ShardedState.SHARDED:
            return held
        if not self._memory.own_is_in_full:
            return 0
        has_own = self._shard_store is None or self._shard_store.window.is_in_memory(self.offloadable)
        return bytes_in_memory(self._memory.own) if has_own else 0

    def held_at_rest(self) -> Iterator[Tensor]:
        """Yield the tensors in memory of a released group, if they are separate from `full`."""
        if self.frees_memory and self.sharded_state is ShardedState.SHARDED and self._shard_store is None:
            yield from (self._memory.own, self.shard)

    @property
    def bytes_beside(self) -> int:
        """Bytes of the memory at rest that is not a part of `full`."""
        memory = {
            storage.data_ptr(): storage.nbytes()
            for storage in (self._memory.own.untyped_storage(), self.shard.untyped_storage())
        }
        memory.pop(self.full.untyped_storage().data_ptr(), None)
        return sum(memory.values())

    @cached_property
    def param_shards(self) -> ParamShards:
        """The parts of parameters in this rank's shard."""
        return self.layout.param_shards(self.axes.states.place)

    def adopt(self, full: Tensor) -> None:
        """Take the buffer of the transport, (padded_numel,) of `dtype`, zero-filled, and keep its memory for good."""
        assert full.numel() == self.layout.padded_numel and full.dtype == self.plan.dtype
        self.full = full
        self._memory = GroupMemory.kept(full, full[self.at_rest])
        # A quantized gather overwrites `full`, so exact values need separate memory.
        self.shard = full[self.own] if self._codec.is_exact else torch.zeros_like(full[self.own])

    def adopt_memory(self, memory: GroupMemory, shard_store: ShardStore | None = None) -> None:
        """Take addresses for all parameters, with memory for the resting part alone, all zero.

        shard_store: the store that holds the shard whenever the group is not full.
        """
        self._memory, self._shard_store = memory, shard_store
        # An offloaded group frees memory even on a single rank.
        self.frees_memory |= shard_store is not None
        self.full = memory.full
        self.sharded_state = ShardedState.SHARDED
        # Before the view: torch makes no view of a storage without memory.
        memory.take_own()
        first = self.own.start - self.at_rest.start
        self.shard = self._memory.own[first : first + self.layout.shard_numel]
        if self.plan.sends_differences:
            # The memory at rest then has the values after quantization, which all ranks agree on.
            self.shard = torch.zeros_like(self.shard)
        # Memory has arbitrary content when it is taken.
        self._memory.own.zero_()
        if shard_store is None:
            return
        memory.give_own()
        self.offloadable = shard_store.offloadable(self.plan.name, self._take_own, lambda _: memory.give_own())
        # A first version in the store, as a load of an unknown key is an error.
        shard_store.window.create(self.offloadable).zero_()
        shard_store.window.release(self.offloadable)
        shard_store.window.wait()

    @property
    def own(self) -> slice:
        """This rank's range of `full`: the shard that it updates."""
        numel = self.layout.shard_numel
        return slice(self.axes.states.place * numel, (self.axes.states.place + 1) * numel)

    @property
    def at_rest(self) -> slice:
        """The range of `full` that a release keeps. It includes `own`."""
        numel = self.layout.padded_numel // self.axes.parameters.size
        return slice(self.axes.parameters.place * numel, (self.axes.parameters.place + 1) * numel)

    def place(self, param_shard: ParamShard, values: Tensor) -> None:
        """Copy a parameter's values to this rank's part of it. values: the whole parameter, any shape and dtype."""
        part = values.reshape(-1)[param_shard.in_param]
        own = self.own_values(changes=True)
        values_of(own)[param_shard.in_shard].copy_(part)

    def own_values(self, changes: bool = False) -> Memory:
        """Return this rank's shard, in memory or in a store. changes: the caller writes to it."""
        shard_store = self._shard_store
        if shard_store is None:
            return self.shard
        return StoredRange(
            self.layout.shard_numel, self.plan.dtype, lambda: shard_store.window.open(self.offloadable, changes)
        )

    def _take_own(self) -> Tensor:
        self._memory.take_own()
        return self.shard

    def install(self) -> None:
        """Make the parameters views of `full`. This frees their former memory."""
        untransformed(self._hide if self.frees_memory else self._show)

    def assigned(self) -> str | None:
        """Return which parameter of a full group is no view of `full` any more: its `.data` was assigned."""
        found, expected = [*map(Tensor.data_ptr, self.params)], [*map(Tensor.data_ptr, self._views)]
        if found == expected:
            return None
        named = zip(self.layout.names, found, expected, strict=True)
        return next(name for name, address, own in named if address != own)

    # -- full and sharded -----------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start to gather the parameters. Does nothing unless the group is SHARDED."""
        if self.sharded_state is not ShardedState.SHARDED:
            return
        if self.returning is not None:
            self.returning()
        if (shard_store := self._shard_store) is not None:
            # So that a change is saved before another rank reads it.
            shard_store.window.end_hold(self.offloadable)
            shard_store.window.prefetch(self.offloadable)
            self._memory.take_others()
            self.sharded_state = ShardedState.LOADING
            return
        if self.frees_memory:
            self._memory.take_others()
            self._pending = untransformed(self._exchange)
        self.sharded_state = ShardedState.UNSHARDING

    def continue_gather(self) -> None:
        """Start the collective of an offloaded group, once its shard is loaded. `start_gather` starts only the load."""
        if self._shard_store is not None and self.sharded_state is ShardedState.LOADING:
            self.sharded_state = ShardedState.UNSHARDING
            # Waits for the load: the collective reads the shard.
            self._shard_store.window.acquire(self.offloadable)
            self._pending = untransformed(self._exchange)

    def gather(self) -> None:
        """Gather the parameters, and wait for them."""
        if self.sharded_state is ShardedState.UNSHARDED:
            return
        if self.frees_memory:  # else the memory was kept, and only the marks change
            self.start_gather()
            self.continue_gather()
            untransformed(self._take_gathered)
        # The memory was kept, but the host may still be updating this shard.
        elif self.returning is not None:
            self.returning()
        mark_present(self.params)
        self.sharded_state = ShardedState.UNSHARDED

    @property
    def waits_for_update(self) -> bool:
        """Whether an update may outlast the step: the parameters are seen after a gather, and a gather waits."""
        return bool(self.plan.sharding.parameters) and not self.axes.are_refreshed

    @property
    def is_loaded(self) -> bool:
        """Whether a gather loads the shard from a store first."""
        return self._shard_store is not None

    def join_gather(self) -> Pending:
        """Send this rank's shard to ranks that gather the group. It is full on this rank."""
        return untransformed(self._exchange)

    def park(self) -> None:
        """Mark full parameters as released but keep their memory: as UNSHARDING, without a pending collective."""
        untransformed(self._hide)
        self.sharded_state = ShardedState.UNSHARDING

    def release(self, holds_shard: bool = False) -> None:
        """Free the full parameters, if the policy frees parameters and `keeper` does not hold them.

        holds_shard: an offloaded shard stays in memory, because its update comes next.
        """
        # Without axes for `parameters` (stages 0 to 2) parameters are never marked as released.
        if not self.plan.sharding.parameters or self.sharded_state is ShardedState.SHARDED:
            return
        if self.keeper is not None and self.keeper():
            return
        if self.frees_memory:
            if self.sharded_state is not ShardedState.UNSHARDED:
                # Prefetched, and not used: a collective cannot be cancelled, and would write to freed memory.
                self.continue_gather()
                untransformed(self._take_gathered)
            untransformed(self._hide)
            self._memory.give_others()
        else:
            mark_released(self.params, self.layout.names)
        self.sharded_state = ShardedState.SHARDED
        if self._shard_store is not None and self._shard_store.window.is_in_memory(self.offloadable):
            window = self._shard_store.window
            window.hold(self.offloadable) if holds_shard else window.release(self.offloadable)

    def keep(self, as_long_as: Callable[[], bool] = lambda: True) -> None:
        """Make `release` do nothing while `as_long_as()`: a rank may use the parameters without the other ranks."""
        self.keeper = as_long_as

    def release_kept(self) -> None:
        """End `keep`, and release."""
        self.keeper = None
        self.release()

    def refresh(self, is_update: bool = False) -> Pending:
        """Gather updated shards into the memory at rest. Views of it stay valid.

        is_update: the memory has the values of the step before, so differences can be sent; else exact values are sent.
        """
        if not self.axes.are_refreshed:
            return _NOTHING_PENDING
        what = f"gather of {self.plan.name}"
        if is_update:
            return self._codec.gather(self.axes.refreshed, self._memory.own, self.shard, what, is_update=True)
        return self.axes.refreshed.transport.gather(self._memory.own, self.shard, what)

    @property
    def rests_beside(self) -> bool:
        """Whether a gather writes different values to `full` than this rank has at rest."""
        return not self.axes.are_refreshed and not self._codec.is_exact

    def make_exact(self) -> None:
        """Fill `full` with the exact values of all ranks' shards, if the gather was quantized. A collective."""
        assert self.sharded_state is ShardedState.UNSHARDED
        if self._codec.is_exact:
            return
        # First the part at rest, from the ranks that update it; then `full`, from the ranks with the other parts.
        self.refresh().wait()
        if self.axes.parameters.size > 1:
            transport, what = self.axes.parameters.transport, f"gather of {self.plan.name}"
            untransformed(lambda: transport.gather(self.full, self._memory.own, what).wait())

    def _exchange(self) -> Pending:
        what = f"gather of {self.plan.name}"
        if self.axes.are_refreshed:
            # hpZ: a gather within a host sends weights as they are. `refresh` has quantized and dequantized them.
            return self.axes.parameters.transport.gather(self.full, self._memory.own, what)
        return self._codec.gather(self.axes.parameters, self.full, self._memory.own, what)

    def _take_gathered(self) -> None:
        self._pending.wait()
        self._pending = _NOTHING_PENDING
        self._show()

    def _show(self) -> None:
        """Point the parameters to their views of `full`."""
        if not self._views:  # torch makes views only while there is memory, and keeps them
            self._views = [self.full[s.in_flat].view(s.shape) for s in self.layout.param_views]
        self._point(self._views)

    def _hide(self) -> None:
        """Point the parameters to expanded NaNs, and make reading them raise."""
        if not self._without_values:
            with torch.inference_mode(False):
                # Integers have no NaN.
                value = torch.nan if self.full.dtype.is_floating_point else 0
                nothing = torch.full((), value, dtype=self.full.dtype, device=self.full.device)
                self._without_values = [nothing.expand(param.shape) for param in self.params]
        self._point(self._without_values)
        mark_released(self.params, self.layout.names)

    def _point(self, values: Sequence[Tensor]) -> None:
        # `ReleasedParameter.__torch_function__` would run in Python for each parameter.
        with torch._C.DisableTorchFunctionSubclass():
            for param, value in zip(self.params, values, strict=True):
                # As FSDP2 does. Autograd's saved tensors keep the storage of `full`, whatever `data` is now.
                param.data = value


_NOTHING_PENDING = Pending()


def values_of(memory: Memory) -> Tensor:
    """Return the values of a memory. They are valid until another stored range is opened."""
    return memory if isinstance(memory, Tensor) else memory.open()


def part_of(memory: Memory, region: slice) -> Memory:
    """Return the elements of a memory in this region."""
    return memory[region] if isinstance(memory, Tensor) else memory.part(region.start, region.stop)


Backing = tuple[Callable[[], object], Callable[[], object]]
"""(take, give): takes memory for a range of addresses, with arbitrary content, and frees it."""


class GroupMemory:
    """Addresses for `full`, (padded_numel,), and for `own`, its resting part, with memory that comes and goes."""

    def __init__(
        self, full: Tensor, own: Tensor, own_is_in_full: bool, of_own: Sequence[Backing], of_others: Sequence[Backing]
    ) -> None:
        """own_is_in_full: `own` shares the memory of `full`. of_own: the memory of `own`. of_others: of the elements of
        `full` that `own` does not cover.
        """
        self.full, self.own, self.own_is_in_full = full, own, own_is_in_full
        self._of_own, self._of_others = of_own, of_others

    @classmethod
    def kept(cls, full: Tensor, own: Tensor) -> GroupMemory:
        """Keep all memory for good."""
        return cls(full, own, True, (), ())

    @classmethod
    def in_pages(cls, pages: PagedBuffer, own: slice, is_beside: bool) -> GroupMemory:
        """Use pages that move between buffers: [Note: moving pages].

        own: elements at rest. is_beside: they have separate memory, because `full` gets different values.
        """
        full = pages.tensor

        def of(start: int, end: int) -> Backing:
            return partial(pages.populate, start, end), partial(pages.vacate, start, end)

        if not is_beside:
            return cls(full, full[own], True, [of(own.start, own.stop)], [of(0, own.start), of(own.stop, full.numel())])
        beside = torch.empty(own.stop - own.start, dtype=full.dtype)
        return cls(full, beside, False, [_resized(beside)], [of(0, full.numel())])

    @classmethod
    def in_storages(cls, full: Tensor, own_numel: int) -> GroupMemory:
        """Resize storages, on any device. `own` has a separate storage, unless it is all of `full`.

        The memory of `full` is freed at once.
        """
        if own_numel == full.numel():
            return cls(full, full, True, [_resized(full)], [])
        own = torch.empty(own_numel, dtype=full.dtype, device=full.device)
        return cls(full, own, False, [_resized(own)], [_resized(full)])

    def take_own(self) -> None:
        for take, _ in self._of_own:
            take()

    def take_others(self) -> None:
        for take, _ in self._of_others:
            take()

    def give_own(self) -> None:
        for _, give in self._of_own:
            give()

    def give_others(self) -> None:
        for _, give in self._of_others:
            give()


def _resized(tensor: Tensor) -> Backing:
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    storage.resize_(0)
    return partial(storage.resize_, nbytes), partial(storage.resize_, 0)
