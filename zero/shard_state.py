"""Master weights and optimizer states of a group's shard: in memory, in chunks, and by piece of a parameter."""

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
from .layout import Piece, Pieces
from .master_weights import MASTER, REMAINDERS, Masters, NewStates, WeightForm, kinds_of_block, scaled, scaled_numel
from .placement import Chunk, OffloadedStates, ShardRest
from .versions import ParameterVersions, Speculation, Version


class WidenedStates:
    """Holds the float32 values of one part of a shard at a time, and brings changes back into its bytes."""

    def __init__(self) -> None:
        self._part: object | None = None
        self._values: dict[str, Tensor] = {}
        self._write: Callable[[], Mapping[str, Tensor]] | None = None  # gives the bytes of what was changed

    def open(self, part: object, stored: Callable[[bool], Mapping[str, Tensor]], changes: bool) -> dict[str, Tensor]:
        """The values by name, (n,) float32, until another part is opened.

        stored: gives payloads and scales, as `new_states` names them; told whether they are for change.
        """
        if self._part is not part:
            self.settle()
            self._part = part
            self._values = {name: state.widened() for name, state in _states_in(stored(False)).items()}
        if changes:
            self._write = partial(stored, True)
        return self._values

    def settle(self) -> None:
        """Ends the use of what is open. Values that changed are rounded to the nearest that 8 bits have."""
        if self._write is not None:
            for name, state in _states_in(self._write()).items():
                state.narrow(self._values[name])
        self._part, self._values, self._write = None, {}, None


def _states_in(tensors: Mapping[str, Tensor]) -> dict[str, StoredState]:
    return {
        name: StoredState(tensor, tensors.get(name + SCALE_SUFFIX))
        for name, tensor in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }


@dataclass(frozen=True)
class Run:
    """A stretch of a shard whose parameters have the same options."""

    start: int
    end: int
    options_index: int  # in the optimizer's param_groups


class ShardRuns:
    """The stretches of a group's shard, and the parameters that have a part in it."""

    def __init__(self, group: ShardedGroup, options_index_of: Mapping[int, int]) -> None:
        """options_index_of: id of a parameter -> index in param_groups."""
        self._group = group
        self._options_index_of = options_index_of
        self.param_ids = frozenset(id(group.params[piece.index]) for piece in group.pieces)
        """Of the parameters that have a part here."""
        self.all = [run for run, _ in self.stretches(lambda _: 0)]

    def stretches(self, step_of: Callable[[int], int]) -> list[tuple[Run, int]]:
        """`all`, cut where parameters have made another number of steps, with that number.

        step_of: the identity of a parameter -> its number.
        """
        starts: list[tuple[int, int, int]] = []
        for piece in self._group.pieces:
            param_id = id(self._group.params[piece.index])
            index, step = self._options_index_of[param_id], step_of(param_id)
            if not starts or starts[-1][1:] != (index, step):
                starts.append((piece.offset_in_shard, index, step))
        # A run reaches to the next one, padding included: whole vectors, so that no element is a rest of its own.
        ends = [start for start, *_ in starts[1:]] + [self._group.layout.shard_numel]
        return [(Run(start, end, index), step) for (start, index, step), end in zip(starts, ends, strict=False)]

    def options_index(self, index: int) -> int:
        """In param_groups, of the parameter with that index in the group."""
        return self._options_index_of[id(self._group.params[index])]


class StatesInMemory:
    """Of elements [0, numel) of a shard. Masters are there at once, states from `make` until `forget`."""

    def __init__(self, numel: int, form: WeightForm, device: torch.device, new_states: NewStates) -> None:
        self.numel = numel
        self.master = huge_zeros(numel, torch.float32, device) if form.is_mixed else None
        """(numel,), where it is beside the parameters."""
        self.states: dict[str, Tensor] = {}
        self._are_made = False  # of which there may be none
        self.factors: dict[int, dict[str, Tensor]] = {}
        """Index in the group of a matrix that this rank owns -> its states that are not elementwise, by name."""
        self.update: ShardUpdate | None = None
        """What an update of all that is in memory needs, as of the last one; None where other states came since."""
        self._form = form
        self._device = device
        self._new_states = new_states

    def make(self) -> None:
        """Takes memory for the states of the part that is in memory, with their first values; leaves those it has."""
        if self._are_made:
            return
        self._are_made = True
        first = self._new_states(torch.zeros(STATE_BLOCK_NUMEL, dtype=self._form.master_dtype))
        for name, block in first.items():
            if name not in self.states:
                numel = scaled_numel(block.numel(), self.numel)
                self.states[name] = huge_zeros(numel, block.dtype, self._device)
                if block.any():
                    self.states[name].fill_(block[0])  # every element begins alike

    def forget(self) -> None:
        """Gives the memory of `make` back."""
        self.states.clear()
        self.factors.clear()
        self._are_made, self.update = False, None


class StatePart(NamedTuple):
    """A stretch of a shard while its states are at hand, (end - start,) each."""

    start: int
    end: int
    master: Tensor
    states: Sequence[Tensor]
    rounded: Tensor | None  # where the new master weights go in the dtype of the parameters, if that is another one


class Kept(Protocol):
    """What an update keeps of each parameter."""

    @property
    def masters(self) -> Masters: ...

    @property
    def seed(self) -> int:
        """Of what is rounded at random without masters."""

    def new_states(self, master: Tensor, options_index: int) -> dict[str, Tensor]:
        """The states of master weights, (n,), before the first step, by name.

        options_index: in param_groups, of the parameters.
        """


class ShardState:
    """The first elements of the states are in memory, the rest is in the chunks of a store.

    Where the model is on a device, either all of a shard's states are there, or all are on the host, `is_apart`, and so
    is their update.

    The master weights are the shard itself where parameters are float32 or wider, or bfloat16 without masters.
    """

    def __init__(
        self,
        gradient: GroupGradient,
        resident_numel: int,
        options_index_of: Mapping[int, int],
        kept: Kept,
        homes: ShardHomes,
    ) -> None:
        """resident_numel: of the shard, whose states stay in memory. options_index_of: id of a parameter -> index in
        param_groups. kept: what the update keeps of the shard. homes: of all shards.
        """
        self.gradient = gradient
        self.group = gradient.group
        self.form = WeightForm.of(self.group, kept.masters, kept.seed)
        self.runs = ShardRuns(self.group, options_index_of)
        self.is_apart = gradient.leaves_device
        """Whether the update runs on the host and the parameters are on a device."""
        first = options_index_of[id(self.group.params[0])] if self.group.params else 0
        self._new_states = partial(kept.new_states, options_index=first)
        self.memory = StatesInMemory(resident_numel, self.form, self.group.shard.device, self._new_states)
        self._widened = homes.widened
        kinds = kinds_of_block(self.group.plan.dtype, kept.masters, self._new_states)
        numel = self.group.layout.shard_numel
        self.chunks = homes.offloaded.divide(self.group.plan.name, resident_numel, numel, partial(scaled, kinds))
        self.resident = self.group.resident
        """The parameters' values, for the update."""
        host = homes.host if self.is_apart else None
        if host is not None:
            # In mixed precision they are made of the master weights alone.
            needs_values = not (self.form.is_mixed and self.runs.all)
            self.resident = host.resident(self.group, homes.rest, needs_values)
        self.versions = ParameterVersions(self.group, self.memory.master, host)

    @property
    def master(self) -> Tensor:
        """(n,): the master weights that are in memory; of a shard in a store, while that is open."""
        return self.group.shard if self.memory.master is None else self.memory.master

    @cached_property
    def pieces(self) -> Pieces:
        """The group's pieces, cut where the states lie in different chunks."""
        edges = [chunk.start for chunk in self.chunks]
        return Pieces(part for piece in self.group.pieces for part in _cut(piece, edges))

    def fill_chunks(self) -> None:
        """First values in the store; master weights are zero."""
        for chunk in self.chunks:
            like = torch.zeros(chunk.end - chunk.start, dtype=self.form.master_dtype)
            chunk.fill({**({MASTER: like} if self.form.is_mixed else {}), **self._new_states(like)})

    def begin_with_parameters(self) -> None:
        """Master weights, where the parameters are others, are these: there were none before."""
        for piece in self.pieces if self.form.is_mixed else ():
            low = piece.offset_in_shard
            now = values_of(part_of(self.group.own_values(), low, low + piece.numel))
            values_of(self.master_of(piece, changes=True)).copy_(now)

    def parts(self, parameters: Version, speculation: Speculation) -> Iterator[StatePart]:
        """Every stretch of the shard, for an update, each until the next one is asked for.

        parameters: that the update changes, where it runs. speculation: what keeps the states as they were.
        """
        memory = self.memory
        if memory.numel or not self.chunks:
            for values in (*memory.states.values(), *(() if memory.master is None else (memory.master,))):
                speculation.keep(partial(OldVersion.of, values))
            yield self._part(0, memory.numel, memory.master, memory.states, parameters)
        for chunk in self.chunks:
            with chunk.window.use(chunk.resident) as buffer:
                speculation.keep(partial(chunk.resident.fork, buffer))
                tensors = chunk.layout.views(buffer)
                own_master = tensors.pop(MASTER) if self.form.is_mixed else None
                yield self._part(chunk.start, chunk.end, own_master, tensors, parameters)

    def whole(self) -> StatePart:
        """As the only one of `parts`, where all of it is in memory."""
        rounded = None if self.memory.master is None else self.group.shard
        return StatePart(0, self.memory.numel, self.master, list(self.memory.states.values()), rounded)

    # -- by piece of a parameter ----------------------------------------------------------------------------------

    def master_of(self, piece: Piece, changes: bool = False) -> Memory:
        """The master weights of one of `pieces`."""
        low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
        if self.memory.master is None:
            return part_of(self.group.own_values(changes), low, high)
        chunk = self._chunk_of(piece)
        if chunk is None:
            return self.memory.master[low:high]
        return _range_of(chunk, MASTER, self.form.master_dtype, low, high, changes)

    def masters(self, changes: bool = False, ahead: bool = False) -> Iterator[tuple[int, Tensor]]:
        """(offset in the shard, master weights) of each stretch, until the next one is asked for.

        ahead: those after a delayed update, before the parameters are that version.
        """
        if self.memory.master is None:
            is_ahead = ahead and bool(self.versions.ahead.values.numel())
            yield 0, self.versions.ahead.values if is_ahead else values_of(self.group.own_values(changes))
            return
        yield 0, self.memory.master
        for chunk in self.chunks:
            yield chunk.start, chunk.open(changes)[MASTER]

    def states_of(self, piece: Piece, changes: bool = False) -> dict[str, Memory]:
        """The states of one of `pieces`, by name; those in memory only once they are made. 8-bit states as float32."""
        low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
        chunk = self._chunk_of(piece)
        kept = {n: state.dtype for n, state in self.memory.states.items()} if chunk is None else chunk.layout.dtypes
        names = [name for name in kept if name != MASTER and not name.endswith(SCALE_SUFFIX)]
        if any(name + SCALE_SUFFIX in kept for name in names):
            return {name: self._widened_range(chunk, name, low, high, changes) for name in names}
        if chunk is None:
            return {name: self.memory.states[name][low:high] for name in names}
        return {name: _range_of(chunk, name, kept[name], low, high, changes) for name in names}

    def forget_remainders(self, pieces: Iterable[Piece]) -> None:
        """Before the master weights of `pieces` are written: what they are then lacks nothing."""
        if self.form.has_remainder and (self.memory.states or self.chunks):
            for piece in pieces:
                states = self.states_of(piece, changes=True)
                for name in states.keys() & REMAINDERS:
                    values_of(states[name]).zero_()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _part(
        self, start: int, end: int, own_master: Tensor | None, states: Mapping[str, Tensor], parameters: Version
    ) -> StatePart:
        low, high = start - parameters.start, end - parameters.start
        if own_master is None:
            return StatePart(start, end, parameters.values[low:high], list(states.values()), None)
        rounded = parameters.values[low:high] if low >= 0 else None  # else the master weights stand for them
        return StatePart(start, end, own_master, list(states.values()), rounded)

    def _chunk_of(self, piece: Piece) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.start <= piece.offset_in_shard < chunk.end), None)

    def _widened_range(self, chunk: Chunk | None, name: str, low: int, high: int, changes: bool) -> StoredRange:
        start = 0 if chunk is None else chunk.start

        def stored(changes: bool) -> Mapping[str, Tensor]:
            if chunk is None:
                return self.memory.states
            return {key: tensor for key, tensor in chunk.open(changes).items() if key != MASTER}

        part = self if chunk is None else chunk
        return StoredRange(
            high - low,
            torch.float32,
            lambda: self._widened.open(part, stored, changes)[name][low - start : high - start],
        )


def _range_of(chunk: Chunk, name: str, dtype: torch.dtype, low: int, high: int, changes: bool) -> StoredRange:
    """The elements [low, high) of the shard."""
    return StoredRange(high - low, dtype, lambda: chunk.open(changes)[name][low - chunk.start : high - chunk.start])


def _cut(piece: Piece, edges: Sequence[int]) -> Iterator[Piece]:
    """The piece in parts that do not reach across any of the offsets in the shard."""
    low, end = piece.offset_in_shard, piece.offset_in_shard + piece.numel
    for high in [*(edge for edge in edges if low < edge < end), end]:
        start = piece.offset_in_param + low - piece.offset_in_shard
        yield replace(piece, offset_in_param=start, offset_in_shard=low, numel=high - low)
        low = high


class ShardHomes:
    """What all shards of a rank share.

    | part      | what                                      | None                                |
    |-----------|-------------------------------------------|-------------------------------------|
    | offloaded | chunks of states, in a store or on a host |                                     |
    | rest      | parameters, in a store                    | they are in memory                  |
    | host      | copies of what a host updates of a device | the update is where parameters are  |
    """

    def __init__(self, offloaded: OffloadedStates, rest: ShardRest | None, host: HostUpdate | None) -> None:
        self.offloaded = offloaded
        self.rest = rest
        self.host = host
        self.widened = WidenedStates()
        """What opens 8-bit states."""
        self.window = Window() if rest is None else rest.window
        """Of parameters, on their way to the update."""

    def make_shards(
        self, gradients: Sequence[GroupGradient], options_index_of: Mapping[int, int], kept: Kept
    ) -> list[ShardState]:
        """Takes memory for masters and states of groups; arguments as of `ShardState`. Raises OffloadError."""
        numels = self.offloaded.plan.resident_numels([one.group.layout.shard_numel for one in gradients])
        shards = [
            ShardState(gradient, numel, options_index_of, kept, self)
            for gradient, numel in zip(gradients, numels, strict=True)
        ]
        self.offloaded.reserve()
        return shards

    def are_where_computed(self, shards: Iterable[ShardState]) -> bool:
        """Whether all of them rest where they are computed with, their states too."""
        return self.rest is None and not any(shard.is_apart or shard.chunks for shard in shards)

    def expect(self, order: Iterable[ShardState]) -> None:
        """The chunks of these shards in one order: that of the next shard is read while this one is updated."""
        self.offloaded.window.expect([chunk.resident for shard in order for chunk in shard.chunks])

    def put_back(self) -> None:
        """What was opened goes back, with what was changed in it."""
        self.widened.settle()
        self.window.put_back()
        self.offloaded.window.put_back()

    def close(self) -> None:
        """Gives back what is in stores and buffers."""
        if self.rest is None:  # else it is the rest's, which closes it
            self.window.close()
        for place in (self.host, self.offloaded, self.rest):
            if place is not None:
                place.close()
