"""A flat buffer of parameters, sharded over the ranks of one axis."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from ..comm import Mesh, Pending
from ..offload import Memory, StoredRange, Transfer
from .domain import Domain
from .group_memory import GroupMemory
from .layout import FlatLayout, Piece
from .released import mark_present, mark_released
from .shard_rest import ShardRest


class Residence(Enum):
    """Which memory a group holds."""

    FULL = "full"  # `full` holds all parameters, which are views of it
    SHARDED = "sharded"  # only `shard` has values; parameters raise when they are read


class ShardedGroup:
    """Parameters of one unit with the same dtype and requires_grad, flat and sharded.

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
    """

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        layout: FlatLayout,
        mesh: Mesh,
        domain: Domain,
    ) -> None:
        """params: (name, parameter) in the order of the layout. dtype: what they are computed in."""
        self.name = name
        self.names = [name for name, _ in params]
        self.params = [param for _, param in params]
        self.dtype = dtype
        self.layout = layout
        self.domain = domain
        self.axis = mesh.over(domain.parameters)
        self.state_axis = mesh.over(domain.states)
        self.replica_axis = mesh.over(domain.replicas)
        self.copies_are_shared = self.state_axis.route.copies_are_shared  # by its ranks: one of the parameters
        self.is_counted = all(mesh.axes[one.axis].rank == one.places[0] for one in domain.copies)
        self.frees_parameters = bool(domain.parameters)
        self.requires_grad = self.params[0].requires_grad
        self.residence = Residence.FULL
        self.full = torch.empty(0)
        self._resting = torch.empty(0)  # of `full`, or beside it
        self.shard = torch.empty(0)
        self._loading: Transfer | None = None  # of the shard; the gather comes after it
        self._pending: Pending | None = None
        self._memory: GroupMemory | None = None
        self._rest: ShardRest | None = None
        self._has_changed = False  # the shard, while it was full; its store does not know yet
        self._refreshed_axis = mesh.over(domain.refreshed)

    @property
    def frees_memory(self) -> bool:
        """True where a release gives memory back, and a gather needs the other ranks."""
        if self._rest is not None:
            return True
        return self.frees_parameters and self.axis.size > 1 and not self.copies_are_shared

    @property
    def full_bytes(self) -> int:
        """Bytes that `full` takes now."""
        held = self.layout.padded_numel * self.dtype.itemsize
        if not self.frees_memory or self.residence is Residence.FULL or self._is_coming:
            return held
        if self._memory is None or not self._memory.own_is_in_full:
            return 0
        has_own = self._rest is None or self._rest.holds(self)
        return self._resting.nbytes if has_own else 0

    @property
    def pieces(self) -> list[Piece]:
        """What this rank's shard holds."""
        return self.layout.pieces(self.state_axis.place)

    def adopt(self, full: Tensor) -> None:
        """Takes the buffer that the route allocated, (padded_numel,) of `dtype`, zero-filled, and keeps its memory."""
        assert full.numel() == self.layout.padded_numel and full.dtype == self.dtype
        self.full = full
        self._resting = full[self.at_rest]
        self.shard = full[self.own]

    def adopt_memory(self, memory: GroupMemory, rest: ShardRest | None = None) -> None:
        """Takes addresses for all parameters, with memory for what is at rest alone, all zero.

        rest: the shard is there whenever the group is not full.
        """
        self._memory, self._rest = memory, rest
        self.full, self._resting = memory.full, memory.own
        self.residence = Residence.SHARDED
        memory.take_own()
        first = self.own.start - self.at_rest.start
        self.shard = self._resting[first : first + self.layout.shard_numel]  # torch makes no view without memory
        self._resting.zero_()
        if rest is not None:
            rest.keep(self).wait()
            memory.give_own()

    @property
    def own(self) -> slice:
        """This rank's part of `full`: what its states are of."""
        numel = self.layout.shard_numel
        return slice(self.state_axis.place * numel, (self.state_axis.place + 1) * numel)

    @property
    def at_rest(self) -> slice:
        """The part of `full` that stays where the others are freed; `own` lies in it."""
        numel = self.layout.padded_numel // self.axis.size
        return slice(self.axis.place * numel, (self.axis.place + 1) * numel)

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
        return StoredRange(self.layout.shard_numel, self.dtype, lambda: self._open_own(rest, changes))

    def take_own_memory(self) -> None:
        """Memory for the shard of a group that is not full, content arbitrary."""
        assert self._memory is not None
        self._memory.take_own()

    def give_own_memory(self) -> None:
        """The end of `take_own_memory`."""
        assert self._memory is not None
        self._memory.give_own()

    def give_all_memory(self) -> None:
        """No part of the parameters is in memory any more."""
        assert self._memory is not None
        self._memory.give_all()

    def _open_own(self, rest: ShardRest, changes: bool) -> Tensor:
        if self.residence is Residence.SHARDED:
            return rest.open(self, changes)
        self._has_changed = self._has_changed or changes
        return self.shard

    def install(self) -> None:
        """Makes the parameters views of `full`, where that is kept; what they were before is given back."""
        if self.frees_memory:
            self._empty_params()
        else:
            self._point_params_at_full()

    # -- full and sharded -----------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Starts to make the parameters full. Does nothing where that was started, or is so."""
        if self.residence is Residence.FULL or self._is_coming:
            return
        if not self.frees_memory:
            self._pending = Pending()
            return
        assert self._memory is not None
        if self._rest is not None:
            self._rest.make_way(self)
            self._memory.take_all()
            self._loading = self._rest.fetch(self)
        else:
            self._memory.take_others()
            self._pending = self._exchange()

    def continue_gather(self) -> None:
        """Starts what has to wait for the shard to be loaded; a collective then, which `start_gather` was not."""
        loading, self._loading = self._loading, None
        if loading is not None:
            self._pending = Pending()  # for `release`, should the load fail
            loading.wait()
            self._pending = self._exchange()

    def gather(self) -> None:
        """Makes the parameters full."""
        if self.residence is Residence.FULL:
            return
        self.start_gather()
        self.continue_gather()
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        for param in self.params:
            mark_present(param)
        if self.frees_memory:
            self._point_params_at_full()
        self.residence = Residence.FULL

    def release(self, holds_shard: bool = False) -> None:
        """Frees the full parameters; only where the policy frees them at all.

        holds_shard: which else rests in a store, is updated next, and then `let_go`.
        """
        if not self.frees_parameters:
            return
        if self._is_coming:  # prefetched, and then not needed
            self.continue_gather()
            assert self._pending is not None
            self._pending.wait()
            self._pending = None
        elif self.residence is Residence.SHARDED:
            return
        if self.frees_memory:
            self._empty_params()
            self._free_memory(holds_shard)
        else:
            self._mark_released()
        self.residence = Residence.SHARDED

    def refresh(self) -> Pending:
        """Brings updated shards of other ranks to where parameters are at rest, views of which stay as they are."""
        if self._refreshed_axis.size == 1:
            return Pending()
        return self._refreshed_axis.route.gather(self._resting, self.shard, f"gather of {self.name}")

    @property
    def _is_coming(self) -> bool:
        return self._loading is not None or self._pending is not None

    def _exchange(self) -> Pending:
        return self.axis.route.gather(self.full, self._resting, f"gather of {self.name}")

    def _free_memory(self, holds_shard: bool) -> None:
        if self._rest is not None:
            has_changed, self._has_changed = self._has_changed, False
            if holds_shard:
                assert self._memory is not None
                self._memory.give_others()
                self._rest.hold(self, has_changed)
            elif has_changed:
                self._rest.leave(self)
            else:
                self.give_all_memory()
        else:
            assert self._memory is not None
            self._memory.give_others()

    def _empty_params(self) -> None:
        """Shapes without values: a NaN, expanded."""
        nothing = torch.full((), torch.nan if self.dtype.is_floating_point else 0, dtype=self.dtype)
        nothing = nothing.to(self.full.device)
        for param in self.params:
            mark_present(param)
            param.data = nothing.expand(param.shape)
        self._mark_released()

    def _mark_released(self) -> None:
        for name, param in zip(self.names, self.params, strict=True):
            mark_released(param, name)

    def _point_params_at_full(self) -> None:
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            param.data = self.full[slot.offset_in_flat : slot.end_in_flat].view(slot.shape)


def values_of(memory: Memory) -> Tensor:
    """The values, until those of another stored range are asked for."""
    return memory if isinstance(memory, Tensor) else memory.open()


def part_of(memory: Memory, low: int, high: int) -> Memory:
    """The elements [low, high)."""
    return memory[low:high] if isinstance(memory, Tensor) else memory.part(low, high)
