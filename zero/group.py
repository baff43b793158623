"""A flat buffer of parameters, sharded over ranks as its domain says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from ..comm import Mesh, Pending
from ..offload import Memory, Resident, StoredRange, bytes_in_memory
from .domain import Domain
from .domain_axes import DomainAxes
from .group_memory import GroupMemory
from .layout import FlatLayout, Piece
from .plan import Role
from .released import mark_present, mark_released
from .shard_rest import ShardRest
from .transforms import untransformed
from .weight_codec import WeightCodec


def _always() -> bool:
    return True


_NOTHING_PENDING = Pending()


class Residence(Enum):
    """Which memory a group holds."""

    FULL = "full"  # `full` holds all parameters, which are views of it
    COMING = "coming"  # as FULL, but their values are still on their way, and parameters raise when they are read
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

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        layout: FlatLayout,
        mesh: Mesh,
        domain: Domain,
        role: Role,
        codec: WeightCodec,
    ) -> None:
        """params: (name, parameter) in the order of the layout. dtype: what they are computed in. codec: of what goes
        to other ranks.
        """
        self.name = name
        self.names = [name for name, _ in params]
        self.params = [param for _, param in params]
        self.dtype = dtype
        self.layout = layout
        self.domain = domain
        self.axes = DomainAxes(mesh, domain)
        self.frees_parameters = bool(domain.parameters)
        self.role = role
        self._codec = codec
        self.residence = Residence.FULL
        self.full = torch.empty(0)
        self._resting = torch.empty(0)  # of `full`, or beside it
        self.shard = torch.empty(0)
        self.resident = Resident(name, lambda: self.shard)
        """The shard, for a window that brings it to where it is updated."""
        self._pending = _NOTHING_PENDING  # of the last gather
        self.keeper: Callable[[], bool] | None = None
        """Says whether it is kept full, whatever is released."""
        self.is_loading = False
        """The shard comes from its store, and the gather after it: see `continue_gather`."""
        self._memory = GroupMemory(self.full, self.shard)
        self._rest: ShardRest | None = None
        self.frees_memory = self.frees_parameters and self.axes.parameters.size > 1 and not self.axes.copies_are_shared
        """True where a release gives memory back, and a gather needs the other ranks."""
        self._gather_name = f"gather of {name}"
        self._views: list[Tensor] = []  # of `full`: a parameter each
        self._without_values: list[Tensor] = []  # a NaN in the shape of each parameter

    def take_role(self, name: str, role: Role) -> None:
        """From now on that becomes of its parameters, and it is called so."""
        self.name, self.role = name, role
        self._gather_name = f"gather of {name}"

    @property
    def full_bytes(self) -> int:
        """Bytes that `full` takes now."""
        held = self.layout.padded_numel * self.dtype.itemsize
        if not self.frees_memory or self.residence is not Residence.SHARDED:
            return held
        if not self._memory.own_is_in_full:
            return 0
        has_own = self._rest is None or self._rest.window.holds(self.resident)
        return bytes_in_memory(self._resting) if has_own else 0

    def held_at_rest(self) -> Iterator[Tensor]:
        """What is in memory of parameters that nobody uses, where that is another memory than of those in use."""
        if self.frees_memory and self.residence is Residence.SHARDED and self._rest is None:
            yield from (self._resting, self.shard)

    @property
    def bytes_beside(self) -> int:
        """Bytes that what rests here takes, where it is no part of `full`."""
        memory = {
            one.data_ptr(): one.nbytes() for one in (self._resting.untyped_storage(), self.shard.untyped_storage())
        }
        memory.pop(self.full.untyped_storage().data_ptr(), None)
        return sum(memory.values())

    @property
    def pieces(self) -> list[Piece]:
        """What this rank's shard holds."""
        return self.layout.pieces(self.axes.states.place)

    def adopt(self, full: Tensor) -> None:
        """Takes the buffer that the route allocated, (padded_numel,) of `dtype`, zero-filled, and keeps its memory."""
        assert full.numel() == self.layout.padded_numel and full.dtype == self.dtype
        self.full = full
        self._resting = full[self.at_rest]
        self.shard = full[self.own] if self._codec.is_exact else torch.zeros_like(full[self.own])

    def adopt_memory(self, memory: GroupMemory, rest: ShardRest | None = None) -> None:
        """Takes addresses for all parameters, with memory for what is at rest alone, all zero.

        rest: the shard is there whenever the group is not full.
        """
        self._memory, self._rest = memory, rest
        self.frees_memory |= rest is not None
        self.full, self._resting = memory.full, memory.own
        self.residence = Residence.SHARDED
        memory.take_own()
        first = self.own.start - self.at_rest.start
        self.shard = self._resting[first : first + self.layout.shard_numel]  # torch makes no view without memory
        if self.sends_differences:
            self.shard = torch.zeros_like(self.shard)
        self._resting.zero_()
        if rest is None:
            return
        memory.give_own()
        self.resident = rest.resident(self.name, self._take_own, lambda _: memory.give_own())
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
        return StoredRange(self.layout.shard_numel, self.dtype, lambda: rest.window.open(self.resident, changes))

    def _take_own(self) -> Tensor:
        self._memory.take_own()
        return self.shard

    def install(self) -> None:
        """Makes the parameters views of `full`, where that is kept; what they were before is given back."""
        untransformed(self._empty_params if self.frees_memory else self._point_params_at_full)

    # -- full and sharded -----------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Starts to make the parameters full. Does nothing where that was started, or is so."""
        if self.residence is not Residence.SHARDED:
            return
        if self._rest is not None:
            self._rest.window.let_go(self.resident)  # a change is saved now, and not after an update elsewhere
            self._rest.window.prefetch(self.resident)
            self.is_loading = True
            self._memory.take_others()
        elif self.frees_memory:
            self._memory.take_others()
            self._pending = untransformed(self._exchange)
        self.residence = Residence.COMING

    def continue_gather(self) -> None:
        """Starts what has to wait for the shard to be loaded; a collective then, which `start_gather` was not."""
        if self._rest is not None and self.is_loading:
            self.is_loading = False
            self._rest.window.acquire(self.resident)
            self._pending = untransformed(self._exchange)

    def gather(self) -> None:
        """Makes the parameters full."""
        if self.residence is Residence.FULL:
            return
        if self.residence is Residence.SHARDED:
            self.start_gather()
        if self.is_loading:
            self.continue_gather()
        untransformed(self._take_gathered)
        mark_present(self.params)
        self.residence = Residence.FULL

    def release(self, holds_shard: bool = False) -> None:
        """Frees the full parameters; only where the policy frees them at all, and nobody keeps them.

        holds_shard: which else goes back to its store, is updated next.
        """
        if not self.frees_parameters or self.residence is Residence.SHARDED:
            return
        if self.keeper is not None and self.keeper():
            return
        if self.residence is Residence.COMING:  # prefetched, and then not needed
            self.continue_gather()
            untransformed(self._take_gathered)
        if self.frees_memory:
            untransformed(self._empty_params)
            self._memory.give_others()
        else:
            mark_released(self.params, self.names)
        self.residence = Residence.SHARDED
        if self._rest is not None and self._rest.window.holds(self.resident):
            self._rest.window.hold(self.resident)
            if not holds_shard:
                self._rest.window.let_go(self.resident)

    def keep(self, as_long_as: Callable[[], bool] = _always) -> None:
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
        if is_update:
            return self._codec.refresh(self.axes.refreshed, self._resting, self.shard, self._gather_name)
        return self.axes.refreshed.route.gather(self._resting, self.shard, self._gather_name)

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
            untransformed(lambda: self.axes.parameters.route.gather(self.full, self._resting, self._gather_name).wait())

    def _exchange(self) -> Pending:
        if self.axes.are_refreshed:
            return self.axes.parameters.route.gather(self.full, self._resting, self._gather_name)
        return self._codec.gather(self.axes.parameters, self.full, self._resting, self._gather_name)

    def _take_gathered(self) -> None:
        self._pending.wait()
        self._pending = _NOTHING_PENDING
        if self.frees_memory:
            self._point_params_at_full()

    def _empty_params(self) -> None:
        """Shapes without values: a NaN, expanded."""
        if not self._without_values:
            with torch.inference_mode(False):
                value = torch.nan if self.dtype.is_floating_point else 0
                nothing = torch.full((), value, dtype=self.dtype, device=self.full.device)
                self._without_values = [nothing.expand(param.shape) for param in self.params]
        _point(self.params, self._without_values)
        mark_released(self.params, self.names)

    def _point_params_at_full(self) -> None:
        if not self._views:  # made while there is memory; torch keeps them, whatever becomes of it
            with torch.inference_mode(False):
                self._views = [self.full[s.offset_in_flat : s.end_in_flat].view(s.shape) for s in self.layout.slots]
        _point(self.params, self._views)


def _point(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """The parameters become these values, released or not."""
    with torch._C.DisableTorchFunctionSubclass():
        for param, value in zip(params, values, strict=True):
            param.data = value


def values_of(memory: Memory) -> Tensor:
    """The values, until those of another stored range are asked for."""
    return memory if isinstance(memory, Tensor) else memory.open()


def part_of(memory: Memory, low: int, high: int) -> Memory:
    """The elements [low, high)."""
    return memory[low:high] if isinstance(memory, Tensor) else memory.part(low, high)
