"""Master weights and optimizer states of a shard: in memory, in chunks, and by piece of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.optimizer_states import SCALE_SUFFIX, STATE_BLOCK_NUMEL, StoredState
from ..kernels.optimizer_step import ShardUpdate
from ..offload import Memory, OldVersion, StoredRange, Window, huge_zeros
from .gradient import GroupGradient
from .group import ShardedGroup, part_of, values_of
from .host_update import HostUpdate
from .layout import ParamShard, ParamShards
from .master_weights import (
    MASTER,
    REMAINDERS,
    MasterWeights,
    NewStates,
    WeightForm,
    kinds_of_block,
    scaled,
    scaled_numel,
)
from .placement import ShardStore, StateChunk, StateChunks
from .versions import ParameterVersions, Speculation


class UpcastStates:
    """Holds float32 values of 8-bit states, of a part of a shard at a time, and writes changes back."""

    def __init__(self) -> None:
        self.is_open = False
        self._part: object | None = None
        self._values: dict[str, Tensor] = {}
        self._write: Callable[[], Mapping[str, Tensor]] | None = None  # returns the tensors to write changes to

    def open(self, part: object, stored: Callable[[bool], Mapping[str, Tensor]], changes: bool) -> dict[str, Tensor]:
        """Return the values by name, (n,) float32, until another part is opened.

        stored: returns payloads and scales, named as in `new_states`; called with whether they are changed.
        """
        if self._part is not part:
            self.flush()
            self._values = {name: state.widened() for name, state in _states_in(stored(False)).items()}
            self._part, self.is_open = part, True  # not before: after an error the part is not open
        if changes:
            # Kept until `flush`, even if a later call only reads the part.
            self._write = partial(stored, True)
        return self._values

    def flush(self) -> None:
        """Close the open part. Changed values are rounded to the nearest 8-bit values."""
        if self._write is not None:
            for name, state in _states_in(self._write()).items():
                state.narrow(self._values[name])
        self._part, self._values, self._write, self.is_open = None, {}, None, False


def _states_in(tensors: Mapping[str, Tensor]) -> dict[str, StoredState]:
    return {
        name: StoredState(tensor, tensors.get(name + SCALE_SUFFIX))
        for name, tensor in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }


@dataclass(frozen=True)
class ShardChunk:
    """A range of a shard whose parameters have the same options."""

    start: int
    end: int
    options_index: int  # in the optimizer's param_groups


class ShardChunks:
    """The chunks of a shard, and the parameters in it."""

    def __init__(self, group: ShardedGroup, options_index_of: Mapping[int, int]) -> None:
        """options_index_of: id of a parameter -> index in param_groups."""
        self._group = group
        self._options_index_of = options_index_of
        self.param_ids = frozenset(id(group.params[param_shard.index]) for param_shard in group.param_shards)
        """Ids of the parameters that have a part in the shard."""
        self.all = [run for run, _ in self.chunks_by_step(lambda _: 0)]

    def chunks_by_step(self, step_of: Callable[[int], int]) -> list[tuple[ShardChunk, int]]:
        """Return the chunks, cut where the number of steps changes, with that number.

        step_of: id of a parameter -> its number of steps.
        """
        starts: list[tuple[int, int, int]] = []
        for param_shard in self._group.param_shards:
            param_id = id(self._group.params[param_shard.index])
            index, step = self._options_index_of[param_id], step_of(param_id)
            if not starts or starts[-1][1:] != (index, step):
                starts.append((param_shard.offset_in_shard, index, step))
        # A run includes the padding up to the next run, so that kernels see whole vectors.
        ends = [start for start, *_ in starts[1:]] + [self._group.layout.shard_numel]
        # strict=False: a shard of padding alone has no start, and still an end.
        return [(ShardChunk(start, end, index), step) for (start, index, step), end in zip(starts, ends, strict=False)]

    def options_index(self, index: int) -> int:
        """Return the index in param_groups of the parameter with this index in the group."""
        return self._options_index_of[id(self._group.params[index])]


class StatesInMemory:
    """Masters and states of elements [0, numel) of a shard. Masters always exist, states from `make` to `forget`."""

    def __init__(self, numel: int, form: WeightForm, device: torch.device, new_states: NewStates) -> None:
        self.numel = numel
        self.master = huge_zeros(numel, torch.float32, device) if form.is_mixed else None
        """(numel,), if masters are separate from the parameters."""
        self.states: dict[str, Tensor] = {}
        self._are_made = False  # a flag, as an optimizer may have no states
        self.factors: dict[int, dict[str, Tensor]] = {}
        """Index in the group of a matrix owned by this rank -> its states that are not elementwise, by name."""
        self.update: ShardUpdate | None = None
        """The cached arguments of the last update; None if states have been replaced since."""
        self._form = form
        self._device = device
        self._new_states = new_states

    def make(self) -> None:
        """Take memory for the states, with their first values. Keeps existing states."""
        if self._are_made:
            return
        self._are_made = True
        first = self._new_states(torch.zeros(STATE_BLOCK_NUMEL, dtype=self._form.master_dtype))
        for name, block in first.items():
            if name not in self.states:
                numel = scaled_numel(block.numel(), self.numel)
                self.states[name] = huge_zeros(numel, block.dtype, self._device)
                # A fill with zeros would only take the memory early: new pages read as zero.
                if block.any():
                    self.states[name].fill_(block[0])  # all elements begin with the same value

    def forget(self) -> None:
        """Free the memory of `make`."""
        self.states.clear()
        self.factors.clear()
        self._are_made, self.update = False, None


class StateView(NamedTuple):
    """A range of a shard while its states are in memory, (end - start,) each."""

    start: int
    end: int
    master: Tensor
    states: Sequence[Tensor]
    rounded: Tensor | None  # the parameters, to which the new master weights are rounded, if they are separate


class Kept(Protocol):
    """The states that an update keeps for each parameter."""

    @property
    def masters(self) -> MasterWeights: ...

    @property
    def seed(self) -> int:
        """Of random rounding without masters."""

    def new_states(self, master: Tensor, options_index: int) -> dict[str, Tensor]:
        """Return the states of master weights, (n,), before the first step, by name.

        options_index: index of the parameters' group in param_groups.
        """


class ShardState:
    """The states of a shard: the first elements in memory, the rest in chunks of a store.

    If the model is on a device, a shard's states are all there, or all on the host with the update (`is_apart`). The
    shard itself holds the master weights if parameters are float32 or wider, or bfloat16 without masters.
    """

    def __init__(
        self,
        gradient: GroupGradient,
        resident_numel: int,
        options_index_of: Mapping[int, int],
        kept: Kept,
        placements: ShardPlacements,
    ) -> None:
        """resident_numel: elements whose states stay in memory. options_index_of: id of a parameter -> index in
        param_groups.

        kept: the states of the update. placements: shared by all shards.
        """
        self.gradient = gradient
        self.group = gradient.group
        self.form = WeightForm.of(self.group, kept.masters, kept.seed)
        self.runs = ShardChunks(self.group, options_index_of)
        self.is_apart = gradient.leaves_device
        """Whether the update runs on the host and the parameters are on a device."""
        # Parameters whose options decide the states (matrices of Muon, say) are in separate groups: see `_plan_groups`.
        first = options_index_of[id(self.group.params[0])] if self.group.params else 0
        self._new_states = partial(kept.new_states, options_index=first)
        self.memory = StatesInMemory(resident_numel, self.form, self.group.shard.device, self._new_states)
        self._widened = placements.widened
        kinds = kinds_of_block(self.group.plan.dtype, kept.masters, self._new_states)
        numel = self.group.layout.shard_numel
        self.chunks = placements.offloaded.divide(self.group.plan.name, resident_numel, numel, partial(scaled, kinds))
        self.offloadable = self.group.offloadable
        """The parameters' values, for the update."""
        host = placements.host if self.is_apart else None
        if host is not None:
            # In mixed precision the master weights alone determine them.
            needs_values = not (self.form.is_mixed and self.runs.all)
            self.offloadable = host.offloadable(self.group, placements.shard_store, needs_values)
        self.window = placements.window if host is None else host.window
        """Loads `offloadable`."""
        self.versions = ParameterVersions(self.group, self.memory.master, host)

    @property
    def master(self) -> Tensor:
        """(n,): the master weights in memory. Of an offloaded shard: valid while it is open."""
        return self.group.shard if self.memory.master is None else self.memory.master

    @cached_property
    def param_shards(self) -> ParamShards:
        """The group's pieces, cut at the ends of chunks."""
        edges = [chunk.start for chunk in self.chunks]
        return ParamShards(part for param_shard in self.group.param_shards for part in _cut(param_shard, edges))

    def fill_chunks(self) -> None:
        """Store the first states; master weights are zero."""
        for chunk in self.chunks:
            like = torch.zeros(chunk.end - chunk.start, dtype=self.form.master_dtype)
            chunk.fill({**({MASTER: like} if self.form.is_mixed else {}), **self._new_states(like)})

    def begin_with_parameters(self) -> None:
        """Set separate master weights to the current parameters."""
        for param_shard in self.param_shards if self.form.is_mixed else ():
            now = values_of(part_of(self.group.own_values(), param_shard.in_shard))
            values_of(self.master_of(param_shard, changes=True)).copy_(now)

    def parts(self, parameters: Tensor, speculation: Speculation) -> Iterator[StateView]:
        """Yield every part of the shard for an update. A part is valid until the next.

        parameters: the version that the update changes: the shard, or its last elements (`ParameterVersions`).
        speculation: keeps old states.
        """
        memory = self.memory
        # An empty shard has a part too: `TorchUpdate` expects a single part.
        if memory.numel or not self.chunks:
            for values in (*memory.states.values(), *(() if memory.master is None else (memory.master,))):
                speculation.keep(partial(OldVersion.of, values))
            yield self._part(0, memory.numel, memory.master, memory.states, parameters)
        for chunk in self.chunks:
            with chunk.window.use(chunk.offloadable) as buffer:
                # The old version stays in the store, and the new version is written beside it.
                speculation.keep(partial(chunk.offloadable.fork, buffer))
                tensors = chunk.views(buffer)
                own_master = tensors.pop(MASTER) if self.form.is_mixed else None
                yield self._part(chunk.start, chunk.end, own_master, tensors, parameters)

    def whole(self) -> StateView:
        """Return the single part of a shard that is all in memory."""
        rounded = None if self.memory.master is None else self.group.shard
        return StateView(0, self.memory.numel, self.master, list(self.memory.states.values()), rounded)

    # -- by piece of a parameter ----------------------------------------------------------------------------------

    def master_of(self, param_shard: ParamShard, changes: bool = False) -> Memory:
        """Return the master weights of a piece."""
        if self.memory.master is None:
            return part_of(self.group.own_values(changes), param_shard.in_shard)
        chunk = self._chunk_of(param_shard)
        if chunk is None:
            return self.memory.master[param_shard.in_shard]
        return _range_of(chunk, MASTER, self.form.master_dtype, param_shard, changes)

    def masters(self, changes: bool = False, ahead: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset in the shard, master weights) of each part. A part is valid until the next.

        ahead: the values after a delayed update, before the parameters take them.
        """
        if self.memory.master is None:
            is_ahead = ahead and bool(self.versions.ahead.numel())
            yield 0, self.versions.ahead if is_ahead else values_of(self.group.own_values(changes))
            return
        yield 0, self.memory.master
        for chunk in self.chunks:
            yield chunk.start, chunk.open(changes)[MASTER]

    def states_of(self, param_shard: ParamShard, changes: bool = False) -> dict[str, Memory]:
        """Return the states of a piece by name, once they are made; 8-bit states as float32."""
        chunk = self._chunk_of(param_shard)
        kept = {n: state.dtype for n, state in self.memory.states.items()} if chunk is None else chunk.dtypes
        names = [name for name in kept if name != MASTER and not name.endswith(SCALE_SUFFIX)]
        if any(name + SCALE_SUFFIX in kept for name in names):
            return {name: self._widened_range(chunk, name, param_shard, changes) for name in names}
        if chunk is None:
            return {name: self.memory.states[name][param_shard.in_shard] for name in names}
        return {name: _range_of(chunk, name, kept[name], param_shard, changes) for name in names}

    def forget_remainders(self, param_shards: Iterable[ParamShard]) -> None:
        """Zero the remainders of pieces whose master weights are about to be written."""
        if self.form.has_remainder and (self.memory.states or self.chunks):
            for param_shard in param_shards:
                states = self.states_of(param_shard, changes=True)
                for name in states.keys() & REMAINDERS:
                    values_of(states[name]).zero_()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _part(
        self, start: int, end: int, own_master: Tensor | None, states: Mapping[str, Tensor], parameters: Tensor
    ) -> StateView:
        num_lacking = self.group.layout.shard_numel - parameters.numel()
        low, high = start - num_lacking, end - num_lacking
        if own_master is None:
            return StateView(start, end, parameters[low:high], list(states.values()), None)
        rounded = parameters[low:high] if low >= 0 else None  # None: the master weights determine them
        return StateView(start, end, own_master, list(states.values()), rounded)

    def _chunk_of(self, param_shard: ParamShard) -> StateChunk | None:
        return next((chunk for chunk in self.chunks if chunk.start <= param_shard.offset_in_shard < chunk.end), None)

    def _widened_range(
        self, chunk: StateChunk | None, name: str, param_shard: ParamShard, changes: bool
    ) -> StoredRange:
        low = param_shard.offset_in_shard - (0 if chunk is None else chunk.start)

        def stored(changes: bool) -> Mapping[str, Tensor]:
            if chunk is None:
                return self.memory.states
            return {key: tensor for key, tensor in chunk.open(changes).items() if key != MASTER}

        part = self if chunk is None else chunk
        return StoredRange(
            param_shard.numel,
            torch.float32,
            lambda: self._widened.open(part, stored, changes)[name][low : low + param_shard.numel],
        )


def _range_of(chunk: StateChunk, name: str, dtype: torch.dtype, param_shard: ParamShard, changes: bool) -> StoredRange:
    """The values of a piece in the chunk."""
    low, numel = param_shard.offset_in_shard - chunk.start, param_shard.numel
    return StoredRange(numel, dtype, lambda: chunk.open(changes)[name][low : low + numel])


def _cut(param_shard: ParamShard, edges: Sequence[int]) -> Iterator[ParamShard]:
    """Cut the piece at these offsets in the shard."""
    low, end = param_shard.offset_in_shard, param_shard.offset_in_shard + param_shard.numel
    for high in [*(edge for edge in edges if low < edge < end), end]:
        start = param_shard.offset_in_param + low - param_shard.offset_in_shard
        yield replace(param_shard, offset_in_param=start, offset_in_shard=low, numel=high - low)
        low = high


class ShardPlacements:
    """The stores and buffers that all shards of a rank share.

    | part        | content                                       | None                                |
    |-------------|-----------------------------------------------|-------------------------------------|
    | offloaded   | chunks of states, in a store or on the host   |                                     |
    | shard_store | parameters, in a store                        | they are in memory                  |
    | host        | host copies of shards that a host updates     | parameters are updated in place     |
    """

    def __init__(self, offloaded: StateChunks, shard_store: ShardStore | None, host: HostUpdate | None) -> None:
        self.offloaded = offloaded
        self.shard_store = shard_store
        self.host = host
        self.widened = UpcastStates()
        """Opens 8-bit states as float32."""
        self.window = Window() if shard_store is None else shard_store.window
        """Loads parameters for the update."""

    def make_shards(
        self, gradients: Sequence[GroupGradient], options_index_of: Mapping[int, int], kept: Kept
    ) -> list[ShardState]:
        """Take memory for masters and states of groups. Arguments: see `ShardState`. Raises OffloadError."""
        numels = self.offloaded.plan.resident_numels([gradient.group.layout.shard_numel for gradient in gradients])
        shards = [
            ShardState(gradient, numel, options_index_of, kept, self)
            for gradient, numel in zip(gradients, numels, strict=True)
        ]
        self.offloaded.reserve()
        return shards

    def are_where_computed(self, shards: Iterable[ShardState]) -> bool:
        """Whether all shards and their states are in the memory of compute."""
        return self.shard_store is None and not any(shard.is_apart or shard.chunks for shard in shards)

    def expect(self, order: Iterable[ShardState]) -> None:
        """Set the order of updates, so that the next shard's chunks are read during an update."""
        order = list(order)
        if self.host is not None:
            self.host.window.expect([shard.offloadable for shard in order if shard.is_apart])
        self.offloaded.window.expect([chunk.offloadable for shard in order for chunk in shard.chunks])

    def save_open(self) -> None:
        """Close open parts, and save their changes."""
        self.widened.flush()
        self.window.release_idle()
        self.offloaded.window.release_idle()

    def close(self) -> None:
        """Free stores and buffers."""
        if self.shard_store is None:  # else `shard_store` closes it
            self.window.close()
        for place in (self.host, self.offloaded, self.shard_store):
            if place is not None:
                place.close()
