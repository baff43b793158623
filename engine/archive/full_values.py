"""Access to whole parameters of a sharded model, and the way back of changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ...comm import Mesh
from ...zero.group import ShardedGroup, ShardedState, values_of
from ...zero.layout import PARAM_ALIGNMENT_NUMEL, ParamShard, ParamView
from ...zero.optimizer import ShardedOptimizer
from ...zero.shard_state import ShardState
from ...zero.unit import Unit
from .named_state import put_together, taken


class FullValues:
    """Reads and writes full parameters. Every method is a collective: all ranks must call it alike."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        mesh: Mesh,
        note_changed: Callable[[Iterable[str]], None] = lambda names: None,
        note_exact: Callable[[], None] = lambda: None,
    ) -> None:
        """note_changed: is told the names of parameters without states that the caller has changed. note_exact: is told
        that copies of shards are what these are, where they had lost something on their way.
        """
        self._module = module
        self.units = units
        self._groups = [group for unit in units for group in unit.groups]
        self._shards = {id(shard.group): shard for shard in optimizer.shards}
        self._mesh = mesh
        self._note_changed = note_changed
        self._note_exact = note_exact

    def write(self, group: ShardedGroup, index: int, values: Tensor) -> None:
        """Puts a parameter's values, whole and of any float dtype, into this rank's shard and master weights."""
        self._write_own(group, index, taken(group.layout.param_views[index].tensor_shard, values))

    def _write_own(self, group: ShardedGroup, index: int, values: Tensor) -> None:
        """As `write`, of what this rank has of the parameter before it is sharded."""
        for param_shard in group.param_shards.of(index):
            group.place(param_shard, values)
        shard = self._shards.get(id(group))
        if shard is not None:
            shard.forget_remainders(shard.param_shards.of(index))
        if shard is not None and shard.form.is_mixed:
            for param_shard in shard.param_shards.of(index):
                _place_in_master(shard, param_shard, values)

    def write_named(self, name: str, values: Tensor) -> None:
        """As `write`, by name; nothing where this rank's stages of a pipeline do not have the parameter."""
        for group in self._groups:
            if name in group.layout.index_of:
                self.write(group, group.layout.index_of[name], values)

    def refresh(self) -> None:
        """After shards have changed: full buffers that are kept get the new values of all ranks."""
        pending = [group.refresh() for group in self._groups]
        for one in pending:
            one.wait()
        self._mesh.fence("the end of an update")

    def make_copies_exact(self) -> None:
        """Copies of shards that other ranks have, and that lost something on their way, are what the shards are."""
        pending = [group.refresh() for group in self._groups if group.sends_differences]
        for one in pending:
            one.wait()
        if pending:
            self._note_exact()

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], num_changes: Callable[[], int]) -> Iterator[None]:
        """num_changes: of the engine itself, that may come meanwhile. Until then each rank may use them alone."""
        number = num_changes()

        def is_unchanged() -> bool:
            return num_changes() == number

        with self._full(params, is_unchanged) as (groups, wanted):
            before = _marks(groups, wanted)
            yield
            if is_unchanged():  # but for those that a forward has released since
                after = _marks([group for group in groups if group.sharded_state is ShardedState.UNSHARDED], wanted)
                self._check_unchanged([name for name, mark in after.items() if mark != before[name]], groups)

    @contextmanager
    def modified(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """As `gathered`; what is changed in it reaches shards and master weights, unless it ends with an error."""
        with self._full(params, lambda: True) as (groups, wanted), self._private_copies(groups, wanted):
            yield

    @contextmanager
    def copied(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """As `gathered`; the parameters are copies of this rank's own, whose changes are forgotten at the end."""
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
        """The groups of the parameters, full meanwhile, and the identities of those that are wanted; none: all."""
        wanted = {id(param) for param in params}
        known = {id(param) for group in self._groups for param in group.params}
        if wanted - known and self._has_whole:
            raise ValueError(
                f"gathered: expected parameters of the engine's module, found {len(wanted - known)} that are not; "
                "pass the parameters themselves, for example engine.module.head.weight"
            )
        chosen = [g for g in self._groups if not wanted or any(id(param) in wanted for param in g.params)]
        found = [group for group in chosen if group.sharded_state is not ShardedState.UNSHARDED]
        for group in found:
            group.gather()
            group.keep(as_long_as)
        for group in chosen:
            group.make_exact()
        if any(group.sends_differences for group in chosen):
            self._note_exact()
        try:
            yield chosen, wanted
        finally:
            for group in found:
                group.release_kept()

    @property
    def _has_whole(self) -> bool:
        return self._mesh.has_whole

    def state_dict(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Of the whole model, on rank 0. names: of its state_dict, in its order."""
        is_writer = self._mesh.is_first
        values: dict[int, Tensor] = {}
        self.make_copies_exact()
        for group in self._groups:
            exchange = self._mesh.exchange((*group.plan.sharding.portioned, *self._mesh.parallel_dims.layers))
            was_sharded = group.sharded_state is not ShardedState.UNSHARDED
            group.gather()
            group.make_exact()
            for param_view, param in zip(group.layout.param_views, group.params, strict=True):
                whole = param.detach()
                if (
                    group.plan.sharding.portioned or not param_view.tensor_shard.is_all
                ):  # one expert of a list is whole on its rank
                    whole = put_together(exchange, param_view.tensor_shard, whole, group.axes.is_first_of_layers)
                if is_writer:
                    values[id(param)] = whole.cpu().clone()
            if was_sharded:
                group.release()
        if not is_writer:
            return {}
        found = {
            name: values[id(value)] if id(value) in values else value.detach().cpu().clone()
            for name, value in self._module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
        return found if self._has_whole else self._collected(found, names)

    def _collected(self, own: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """On the first rank of a pipeline, what all its ranks have, in the model's order."""
        pipe, peers, device = self._mesh.axes["pipe"], self._mesh.peers, self._mesh.world.device
        if pipe.rank:
            infos = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
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
        """Raises ValueError on every rank where any has changed what it was shown. A collective."""
        for group in groups:
            if changed and not group.frees_memory and group.sharded_state is ShardedState.UNSHARDED:
                group.install()  # the model's parameters are what the engine has, not what was put in their place
        count = torch.tensor([len(changed)], dtype=torch.int64, device=self._mesh.world.device)
        if not int(self._mesh.sum_small(count, "the end of gathered")):
            return
        by_rank = self._mesh.world.gather_objects(changed)
        rank, name = next((rank, names[0]) for rank, names in enumerate(by_rank) if names)
        others = len({name for names in by_rank for name in names}) - 1
        raise ValueError(
            f"parameter '{name}'{f' and {others} more' if others else ''} was changed inside engine.gathered() "
            f"(zero.GatheredParameters in lowtide.deepspeed) on rank {rank}, which not all shards and master weights "
            "see: use engine.gathered(parameter, modify=True), and change it on every rank alike (or GatheredParameters"
            "(parameter, modifier_rank=0), which takes that rank's). To have the values of before, load them again"
        )

    @contextmanager
    def _private_copies(self, groups: Sequence[ShardedGroup], wanted: set[int]) -> Iterator[None]:
        """Parameters are copies of this rank's own meanwhile: the full buffer may be memory that ranks share."""
        self._copy(groups, wanted)
        try:
            yield
        except BaseException:
            for group in groups:
                self._drop_copies(group)
            raise
        self._mesh.world.barrier()  # nobody may still be copying what is overwritten now
        with torch.no_grad():
            for group in groups:
                if id(group) not in self._shards:
                    self._note_changed(_changed(group))
                for index, param in enumerate(group.params):
                    if not wanted or id(param) in wanted:
                        self._write_own(group, index, param.data)
                self._drop_copies(group)
                group.refresh().wait()
        self._mesh.fence("the end of a change of parameters")

    def _copy(self, groups: Sequence[ShardedGroup], wanted: set[int]) -> None:
        for group in groups:
            for param in group.params:
                if not wanted or id(param) in wanted:
                    param.data = param.data.clone()

    def _drop_copies(self, group: ShardedGroup) -> None:
        """The group's parameters are what the engine has."""
        if group.frees_memory:
            group.release_kept()
        else:
            group.install()


_Mark = tuple[int, int, int, bytes]


def _marks(groups: Sequence[ShardedGroup], wanted: Collection[int]) -> dict[str, _Mark]:
    """Of parameters that are full, by name: the place and version of each, and the sum of its bits. It reads them once.

    wanted: identities of the parameters; none: all.
    """
    return {
        param_view.name: _mark(group, param_view, param)
        for group in groups
        for param_view, param in zip(group.layout.param_views, group.params, strict=True)
        if not wanted or id(param) in wanted
    }


def _mark(group: ShardedGroup, param_view: ParamView, param: nn.Parameter) -> _Mark:
    values = group.full[param_view.offset_in_flat : param_view.end_in_flat]
    whole = (
        param_view.numel - param_view.numel % PARAM_ALIGNMENT_NUMEL
    )  # where parameters begin, so that words are aligned
    tail: Tensor = values[whole:].view(torch.uint8)
    return param.data_ptr(), param._version, int(values[:whole].view(torch.int64).sum()), bytes(tail.tolist())


def _changed(group: ShardedGroup) -> list[str]:
    """The names of parameters of a full group that have other values than it."""
    pairs = zip(group.layout.param_views, group.params, strict=True)
    return [
        param_view.name
        for param_view, param in pairs
        if not torch.equal(param.data.reshape(-1), group.full[param_view.offset_in_flat : param_view.end_in_flat])
    ]


def _place_in_master(shard: ShardState, param_shard: ParamShard, values: Tensor) -> None:
    part = values.reshape(-1)[param_shard.offset_in_param : param_shard.offset_in_param + param_shard.numel]
    values_of(shard.master_of(param_shard, changes=True)).copy_(part)


def give_own_storages(
    units: Sequence[Unit], module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """A hook of the module's `state_dict`: its parameters have storages of their own, over the same memory.

    They are parts of flat buffers, which `save_model` of safetensors refuses. A change of them stays a change of the
    parameters. Where a group frees its memory they stay parts of it, and cannot be read while they are released.
    """
    groups = (group for unit in units for group in unit.groups)
    flat = {group.full.untyped_storage().data_ptr() for group in groups if not group.frees_memory}
    own: dict[tuple[int, int], UntypedStorage] = {}  # by address and bytes: tied parameters have the same one
    for value in state_dict.values():
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.numel():
            continue
        storage = value.untyped_storage()
        if storage.data_ptr() in flat and value.is_contiguous():
            start = value.storage_offset() * value.element_size()
            part = own.setdefault((value.data_ptr(), value.nbytes), storage[start : start + value.nbytes])
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            value.data = empty.set_(part, 0, value.shape, value.stride())  # its version stays the parameter's
