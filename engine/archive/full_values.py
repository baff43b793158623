"""Read and write whole parameters of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ...comm import Mesh
from ...zero.group import ShardedGroup, ShardedState, values_of
from ...zero.layout import PARAM_ALIGNMENT_NUMEL, ParamView
from ...zero.optimizer import ShardedOptimizer
from ...zero.unit import Unit
from .named_state import gather_whole


class FullValues:
    """Reads and writes full parameters. Each method is a collective: all ranks must call it alike."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        mesh: Mesh,
        note_changed: Callable[[Iterable[str]], None] = lambda names: None,
        note_exact: Callable[[], None] = lambda: None,
    ) -> None:
        """note_changed: called with the names of frozen parameters that the caller has changed.

        note_exact: called when inexact copies of shards were made exact.
        """
        self._module = module
        self._groups = [group for unit in units for group in unit.groups]
        self._shards = {id(shard.group): shard for shard in optimizer.shards}
        self._mesh = mesh
        self._note_changed = note_changed
        self._note_exact = note_exact

    def write(self, group: ShardedGroup, index: int, values: Tensor) -> None:
        """Write a parameter's values, whole and of any float dtype, into this rank's shard and master weights."""
        self._write_own(group, index, group.layout.param_views[index].tensor_shard.take(values))

    def _write_own(self, group: ShardedGroup, index: int, values: Tensor) -> None:
        """Do `write` with this rank's part of a split layer."""
        for param_shard in group.param_shards.of(index):
            group.place(param_shard, values)
        shard = self._shards.get(id(group))
        if shard is not None:
            # A remainder has the bits that a bfloat16 weight lacks. New values come without them.
            shard.forget_remainders(shard.param_shards.of(index))
        if shard is not None and shard.form.is_mixed:
            for param_shard in shard.param_shards.of(index):
                part = values.reshape(-1)[param_shard.in_param]
                values_of(shard.master_of(param_shard, changes=True)).copy_(part)

    def write_named(self, name: str, values: Tensor) -> None:
        """Do `write` by name; nothing if the parameter is in another stage of a pipeline."""
        for group in self._groups:
            if name in group.layout.index_of:
                self.write(group, group.layout.index_of[name], values)

    def refresh(self) -> None:
        """Bring changed shards of all ranks into the full buffers that are kept."""
        pending = [group.refresh() for group in self._groups]
        for one in pending:
            one.wait()
        self._mesh.fence("the end of an update")

    def make_copies_exact(self) -> None:
        """Refresh copies of shards on other ranks that were sent as rounded differences."""
        pending = [group.refresh() for group in self._groups if group.plan.sends_differences]
        for one in pending:
            one.wait()
        if pending:
            self._note_exact()

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], num_changes: Callable[[], int]) -> Iterator[None]:
        """Make parameters full inside the context. Each rank may use them alone until the engine changes them.

        num_changes: returns the number of changes by the engine.
        """
        number = num_changes()

        def is_unchanged() -> bool:
            return num_changes() == number

        with self._full(params, is_unchanged) as (groups, wanted):
            before = _marks(groups, wanted)
            yield
            if is_unchanged():  # a forward may have released some since
                after = _marks([group for group in groups if group.sharded_state is ShardedState.UNSHARDED], wanted)
                self._check_unchanged([name for name, mark in after.items() if mark != before[name]], groups)

    @contextmanager
    def modified(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Do `gathered`; changes reach shards and master weights at the end, unless an error ends the context."""
        with self._full(params, lambda: True) as (groups, wanted):
            self._copy(groups, wanted)  # the full buffer may be memory that ranks share
            try:
                yield
            except BaseException:
                for group in groups:
                    self._drop_copies(group)
                raise
            changed = {id(group): set(_changed(group)) for group in groups}
            frozen = [name for group, names in changed.items() if group not in self._shards for name in names]
            # Of all ranks: a rank lacks the parameters of other stages, and the other parts of split layers. This is
            # also a barrier: ranks that share memory write below, and another rank may still copy it or compare.
            for names in self._mesh.world.gather_objects(frozen):
                self._note_changed(names)
            with torch.no_grad():
                for group in groups:
                    for index, (name, param) in enumerate(zip(group.layout.names, group.params, strict=True)):
                        # An unchanged value is the rounded master weight, which must keep its low bits.
                        if name in changed[id(group)] and (not wanted or id(param) in wanted):
                            self._write_own(group, index, param.data)
                    self._drop_copies(group)
                    group.refresh().wait()
            self._mesh.fence("the end of a change of parameters")

    @contextmanager
    def copied(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Do `gathered` with private copies of the parameters; their changes are dropped at the end."""
        with self._full(params, lambda: True) as (groups, wanted):
            self._copy(groups, wanted)
            try:
                yield
            finally:
                for group in groups:
                    self._drop_copies(group)

    @contextmanager
    def _full(
        self, params: Sequence[nn.Parameter], as_long_as: Callable[[], bool]
    ) -> Iterator[tuple[list[ShardedGroup], set[int]]]:
        """Yield the parameters' groups, full inside the context, and the ids of the wanted parameters. Empty: all."""
        wanted = {id(param) for param in params}
        known = {id(param) for group in self._groups for param in group.params}
        # In a pipeline an unknown parameter may be in another stage.
        if wanted - known and self._mesh.has_whole:
            raise ValueError(
                f"gathered: expected parameters of the engine's module, found {len(wanted - known)} that are not; "
                "pass the parameters themselves, for example engine.module.head.weight"
            )
        chosen = [g for g in self._groups if not wanted or any(id(param) in wanted for param in g.params)]
        # Groups that are full already, as in a nested context, are not released at the end of this context.
        found = [group for group in chosen if group.sharded_state is not ShardedState.UNSHARDED]
        try:
            for group in found:
                group.gather()
                group.keep(as_long_as)
            for group in chosen:
                group.make_exact()
            if any(group.plan.sends_differences for group in chosen):
                self._note_exact()
            yield chosen, wanted
        finally:
            for group in found:
                group.release_kept()

    def state_dict(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the whole model's tensors on rank 0. names: of its state_dict, in its order."""
        is_writer = self._mesh.is_first
        values: dict[int, Tensor] = {}
        self.make_copies_exact()
        # All ranks gather, though only the first keeps values, in host memory. A single group is full at a time.
        for group in self._groups:
            exchange = self._mesh.exchange((*group.plan.sharding.partitioned, *self._mesh.parallel_dims.layers))
            was_sharded = group.sharded_state is not ShardedState.UNSHARDED
            group.gather()
            group.make_exact()
            for param_view, param in zip(group.layout.param_views, group.params, strict=True):
                whole = param.detach()
                # An expert of a list is whole on its rank, but the other ranks do not have it.
                if group.plan.sharding.partitioned or not param_view.tensor_shard.is_all:
                    whole = gather_whole(exchange, param_view.tensor_shard, whole, group.axes.is_first_of_layers)
                if is_writer:
                    # `clone`: on the CPU `cpu()` returns the view of memory that is released next.
                    values[id(param)] = whole.cpu().clone()
            if was_sharded:
                group.release()
        if not is_writer:
            return {}
        found = {
            name: values[id(value)] if id(value) in values else value.detach().cpu().clone()
            # keep_vars: only the parameters themselves have the ids of `values`.
            for name, value in self._module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
        return found if self._mesh.has_whole else self._collected(found, names)

    def _collected(self, own: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of all ranks of a pipeline on its first rank, in the model's order."""
        pipe, peers, device = self._mesh.axes["pipe"], self._mesh.peers, self._mesh.world.device
        if pipe.rank:
            infos = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
            # Point to point, and waited for: the first stage receives the tensors of each stage in this order.
            peers.send_object(infos, 0, 0, "the names for state_dict").wait()
            for name, value in own.items():
                peers.send(value.to(device).contiguous(), 0, 0, f"'{name}' for state_dict").wait()
            return {}
        for place in range(1, pipe.size):
            for name, shape, dtype in peers.receive_object(place, 0, "the names for state_dict"):
                value = torch.empty(shape, dtype=dtype, device=device)
                peers.receive(value, place, 0, f"'{name}' for state_dict").wait()
                own[name] = value.cpu()
        return {name: own[name] for name in names if name in own}

    def _check_unchanged(self, changed: Sequence[str], groups: Sequence[ShardedGroup]) -> None:
        """Raise ValueError on every rank if any rank has changed parameters that were only shown. A collective."""
        for group in groups:
            if changed and not group.frees_memory and group.sharded_state is ShardedState.UNSHARDED:
                group.install()  # undoes an assignment to `.data`
        # Usually nothing was changed. So a small sum comes first, and ranks exchange names only after a fault.
        count = torch.tensor([len(changed)], dtype=torch.int64, device=self._mesh.world.device)
        if not int(self._mesh.sum_small(count, "the end of gathered")):
            return
        by_rank = self._mesh.world.gather_objects(changed)
        rank, name = next((rank, names[0]) for rank, names in enumerate(by_rank) if names)
        others = len({name for names in by_rank for name in names}) - 1
        raise ValueError(
            f"parameter '{name}'{f' and {others} more' if others else ''} was changed inside engine.gathered() "
            f"(zero.GatheredParameters in lowtide.deepspeed) on rank {rank}, but not all shards and master weights see "
            "it: use engine.gathered(parameter, modify=True), and change it on every rank alike (or GatheredParameters"
            "(parameter, modifier_rank=0), which takes that rank's values). Load the old values again if you need them"
        )

    def _copy(self, groups: Sequence[ShardedGroup], wanted: set[int]) -> None:
        for group in groups:
            for param in group.params:
                if not wanted or id(param) in wanted:
                    param.data = param.data.clone()

    def _drop_copies(self, group: ShardedGroup) -> None:
        """Make the group's parameters views of the engine's memory again."""
        if group.frees_memory:
            group.release_kept()
        else:
            group.install()


_Mark = tuple[int, int, int, bytes]


def _marks(groups: Sequence[ShardedGroup], wanted: Collection[int]) -> dict[str, _Mark]:
    """Return name -> (address, version, sum of bits) of full parameters. Reads each value once. wanted: ids."""
    return {
        param_view.name: _mark(group, param_view, param)
        for group in groups
        for param_view, param in zip(group.layout.param_views, group.params, strict=True)
        if not wanted or id(param) in wanted
    }


def _mark(group: ShardedGroup, param_view: ParamView, param: nn.Parameter) -> _Mark:
    # The flat buffer, not `param.data`: an assignment to `.data` shows in the address, a write in place in the version,
    # and a write through `.data` or NumPy, which counts no version, in the sum.
    values = group.full[param_view.in_flat]
    whole = param_view.numel - param_view.numel % PARAM_ALIGNMENT_NUMEL  # parameters are aligned, so int64 words are
    tail: Tensor = values[whole:].view(torch.uint8)
    return param.data_ptr(), param._version, int(values[:whole].view(torch.int64).sum()), bytes(tail.tolist())


def _changed(group: ShardedGroup) -> list[str]:
    """Return the names of parameters of a full group whose values differ from its flat buffer."""
    pairs = zip(group.layout.param_views, group.params, strict=True)
    return [
        param_view.name
        for param_view, param in pairs
        if param.dtype != group.full.dtype or not torch.equal(param.data.reshape(-1), group.full[param_view.in_flat])
    ]


def give_own_storages(
    units: Sequence[Unit], module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Give the tensors of a module's `state_dict` separate storages over the same memory. A state_dict hook.

    They are views into flat buffers, which `save_model` of safetensors refuses. A change of them still changes the
    parameters. If a group frees its memory, they stay views, and cannot be read while the group is released.
    """
    groups = (group for unit in units for group in unit.groups)
    flat = {group.full.untyped_storage().data_ptr() for group in groups if not group.frees_memory}
    own: dict[tuple[int, int], UntypedStorage] = {}  # by (address, bytes): tied parameters share a storage
    for value in state_dict.values():
        # With keep_vars the values are the parameters themselves, which must stay views of the flat buffer.
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            continue
        storage = value.untyped_storage()
        if storage.data_ptr() in flat and value.is_contiguous():
            start = value.storage_offset() * value.element_size()
            part = own.setdefault((value.data_ptr(), value.nbytes), storage[start : start + value.nbytes])
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            value.data = empty.set_(part, 0, value.shape, value.stride())  # keeps the parameter's version counter
