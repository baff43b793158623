"""Master weights and optimizer states of one group's shard, and where they rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.optimizer_states import SCALE_SUFFIX, STATE_BLOCK_NUMEL
from ..kernels.shard_update import ShardUpdate
from ..kernels.weight_rounding import Rounding
from ..offload import Memory, OldVersion, StoredRange, huge_zeros
from .gradient import GroupGradient
from .group import part_of, values_of
from .host_update import HostUpdate
from .layout import Piece
from .masters import REMAINDERS, Masters
from .offloaded_states import Chunk, OffloadedStates
from .shard_rest import ShardRest
from .speculation import Speculation
from .widened_states import WidenedStates

MASTER = "master"
NewStates = Callable[[Tensor], dict[str, Tensor]]
"""Master weights, (n,) -> the states before the first step, by name."""
Kinds = Mapping[str, tuple[torch.dtype, int]]
"""Name of a tensor of states, or "master" -> its dtype and number of elements."""


@dataclass(frozen=True)
class Run:
    """A stretch of a shard whose parameters have the same options."""

    start: int
    end: int
    options_index: int  # in the optimizer's param_groups


class StatePart(NamedTuple):
    """A stretch of a shard while its states are at hand, (end - start,) each."""

    start: int
    end: int
    master: Tensor
    states: Sequence[Tensor]
    rounded: Tensor | None  # where the new master weights go in the dtype of the parameters, if that is another one


@dataclass(frozen=True)
class Version:
    """The parameters of a shard from element `start` on; those before it are their master weights, rounded."""

    start: int
    values: Tensor  # (shard_numel - start,)


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
    """Elements [0, resident_numel) of the states are in memory, the rest is in the chunks of a store.

    Where the model is on a device, either all of a shard's states are there, or all are on the host, `is_apart`, and so
    is their update.

    The master weights are the shard itself where parameters are float32 or wider, or bfloat16 without masters.

    Parameters may have a second version: the old ones of a speculative update, or what a delayed one makes of
    them while they are computed with. It is beside them, but for what master weights in memory hold already:

                      |  in memory  |   in a store
    without a master  |  `values`   |  `values`           copied from the shard
    with one          |  master     |  `values`           the rounded copy
    """

    def __init__(
        self,
        gradient: GroupGradient,
        resident_numel: int,
        options_index_of: Mapping[int, int],
        kept: Kept,
        widened: WidenedStates,
        offloaded: OffloadedStates,
        rest: ShardRest | None,
        host: HostUpdate | None,
    ) -> None:
        """resident_numel: of the shard, whose states stay in memory. options_index_of: id of a parameter -> index in
        param_groups. kept: what the update keeps of the shard.

        widened: what opens 8-bit states, one for all shards. host: where offloaded states are updated, if that
        is not where the parameters are.
        """
        self.gradient = gradient
        self.group = gradient.group
        masters = kept.masters
        self.is_mixed = masters.are_beside(self.group.plan.dtype)
        self.master_dtype = torch.float32 if self.is_mixed else self.group.plan.dtype
        self.rounding: Rounding | None = None
        """What the parameters are rounded with, where that is at random."""
        if masters.is_drawn and self.group.plan.dtype == torch.bfloat16:
            self.rounding = Rounding.of(kept.seed, self.group.plan.name, self.group.own.start)
        self.has_remainder = masters.remainder is not None and self.group.plan.dtype == torch.bfloat16
        """Whether the last of the states is what the parameters lack."""
        self._options_index_of = options_index_of
        self.param_ids = frozenset(id(self.group.params[piece.index]) for piece in self.group.pieces)
        """Of the parameters that have a part here."""
        self.runs = [run for run, _ in self.stretches(lambda _: 0)]
        numel = self.group.layout.shard_numel
        self.is_apart = gradient.leaves_device
        """Whether the update runs on the host and the parameters are on a device."""
        self.resident_numel = resident_numel
        device = self.group.shard.device
        self._own_master = huge_zeros(self.resident_numel, torch.float32, device) if self.is_mixed else None
        self.states: dict[str, Tensor] = {}
        self._has_states = False  # of which there may be none
        self.factors: dict[int, dict[str, Tensor]] = {}
        """Index in the group of a matrix that this rank owns -> its states that are not elementwise, by name."""
        self.update: ShardUpdate | None = None
        """What an update of all that is in memory needs, as of the last one; None where other states came since."""
        first = options_index_of[id(self.group.params[0])] if self.group.params else 0
        new_states = partial(kept.new_states, options_index=first)
        self._new_states = new_states
        self._widened = widened
        kinds = kinds_of_block(self.group.plan.dtype, masters, new_states)
        self.chunks = offloaded.divide(self.group.plan.name, self.resident_numel, numel, partial(scaled, kinds))
        self._host = host if self.is_apart else None
        self.resident = self.group.resident
        """The parameters' values, for the update."""
        if self._host is not None:
            # In mixed precision they are made of the master weights alone.
            self.resident = self._host.resident(self.group, rest, needs_values=not (self.is_mixed and self.runs))
        self.ahead = Version(self.resident_numel if self.is_mixed else 0, torch.empty(0, dtype=self.group.plan.dtype))
        """What the parameters become by a delayed update; without memory until there is one."""

    @property
    def master(self) -> Tensor:
        """(n,): the master weights that are in memory; of a shard in a store, while that is open."""
        return self.group.shard if self._own_master is None else self._own_master

    @property
    def pieces(self) -> list[Piece]:
        """The group's pieces, cut where the states lie in different chunks."""
        edges = [chunk.start for chunk in self.chunks]
        return [part for piece in self.group.pieces for part in _cut(piece, edges)]

    def stretches(self, step_of: Callable[[int], int]) -> list[tuple[Run, int]]:
        """`runs`, cut where parameters have made another number of steps, with that number.

        step_of: the identity of a parameter -> its number.
        """
        starts: list[tuple[int, int, int]] = []
        for piece in self.group.pieces:
            param_id = id(self.group.params[piece.index])
            index, step = self._options_index_of[param_id], step_of(param_id)
            if not starts or starts[-1][1:] != (index, step):
                starts.append((piece.offset_in_shard, index, step))
        # A run reaches to the next one, padding included: whole vectors, so that no element is a rest of its own.
        ends = [start for start, *_ in starts[1:]] + [self.group.layout.shard_numel]
        return [(Run(start, end, index), step) for (start, index, step), end in zip(starts, ends, strict=False)]

    def make_states(self) -> None:
        """Takes memory for the states of the part that is in memory, with their first values; leaves those it has."""
        if self._has_states:
            return
        self._has_states = True
        device = self.group.shard.device
        first = self._new_states(torch.zeros(STATE_BLOCK_NUMEL, dtype=self.master_dtype))
        for name, block in first.items():
            if name not in self.states:
                numel = _scaled(block.numel(), self.resident_numel)
                self.states[name] = huge_zeros(numel, block.dtype, device)
                if block.any():
                    self.states[name].fill_(block[0])  # every element begins alike

    def forget_states(self) -> None:
        """Gives the memory of `make_states` back."""
        self.states.clear()
        self.factors.clear()
        self._has_states, self.update = False, None

    def fill_chunks(self) -> None:
        """First values in the store; master weights are zero."""
        for chunk in self.chunks:
            like = torch.zeros(chunk.end - chunk.start, dtype=self.master_dtype)
            chunk.fill({**({MASTER: like} if self.is_mixed else {}), **self._new_states(like)})

    def begin_with_parameters(self) -> None:
        """Master weights, where the parameters are others, are these: there were none before."""
        for piece in self.pieces if self.is_mixed else ():
            low = piece.offset_in_shard
            now = values_of(part_of(self.group.own_values(), low, low + piece.numel))
            values_of(self.master_of(piece, changes=True)).copy_(now)

    def parts(self, parameters: Version, speculation: Speculation) -> Iterator[StatePart]:
        """Every stretch of the shard, for an update, each until the next one is asked for.

        parameters: that the update changes, where it runs. speculation: what keeps the states as they were.
        """
        if self.resident_numel or not self.chunks:
            for values in (*self.states.values(), *(() if self._own_master is None else (self._own_master,))):
                speculation.keep(partial(OldVersion.of, values))
            yield self._part(0, self.resident_numel, self._own_master, self.states, parameters)
        for chunk in self.chunks:
            with chunk.window.use(chunk.resident) as buffer:
                speculation.keep(partial(chunk.resident.fork, buffer))
                tensors = chunk.layout.views(buffer)
                own_master = tensors.pop(MASTER) if self.is_mixed else None
                yield self._part(chunk.start, chunk.end, own_master, tensors, parameters)

    def whole(self) -> StatePart:
        """As the only one of `parts`, where all of it is in memory."""
        rounded = None if self._own_master is None else self.group.shard
        return StatePart(0, self.resident_numel, self.master, list(self.states.values()), rounded)

    def as_parts(self) -> list[StatePart]:
        """`whole`, in the form of `parts`."""
        return [self.whole()]

    def options_index(self, index: int) -> int:
        """In param_groups, of the parameter with that index in the group."""
        return self._options_index_of[id(self.group.params[index])]

    # -- second versions ------------------------------------------------------------------------------------------

    def begin_delay(self) -> None:
        """Memory for what the parameters become; takes none where there is some from the last time."""
        numel = self.group.layout.shard_numel - self.ahead.start
        if self.ahead.values.numel() != numel:
            dtype, device = self.group.plan.dtype, self.group.shard.device
            values = huge_zeros(numel, dtype, device) if self._host is None else self._host.lasting(numel, dtype)
            self.ahead = Version(self.ahead.start, values)

    def put(self, version: Version) -> None:
        """The parameters become that version of them; master weights are of it already."""
        shard = values_of(self.group.own_values(changes=True))
        if self._own_master is not None:
            shard[: version.start].copy_(self._own_master)
        shard[version.start :].copy_(version.values, non_blocking=True)

    def keep_parameters(self) -> OldVersion:
        """What they are now."""
        start = self.ahead.start
        old = Version(start, values_of(self.group.own_values())[start:].clone())
        return OldVersion(old.values.nbytes, lambda: self.put(old))

    # -- by piece of a parameter ----------------------------------------------------------------------------------

    def master_of(self, piece: Piece, changes: bool = False) -> Memory:
        """The master weights of one of `pieces`."""
        low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
        if self._own_master is None:
            return part_of(self.group.own_values(changes), low, high)
        chunk = self._chunk_of(piece)
        if chunk is None:
            return self._own_master[low:high]
        return _range_of(chunk, MASTER, self.master_dtype, low, high, changes)

    def masters(self, changes: bool = False, ahead: bool = False) -> Iterator[tuple[int, Tensor]]:
        """(offset in the shard, master weights) of each stretch, until the next one is asked for.

        ahead: those after a delayed update, before the parameters are that version.
        """
        if self._own_master is None:
            is_ahead = ahead and bool(self.ahead.values.numel())
            yield 0, self.ahead.values if is_ahead else values_of(self.group.own_values(changes))
            return
        yield 0, self._own_master
        for chunk in self.chunks:
            yield chunk.start, chunk.open(changes)[MASTER]

    def states_of(self, piece: Piece, changes: bool = False) -> dict[str, Memory]:
        """The states of one of `pieces`, by name; those in memory only once they are made. 8-bit states as float32."""
        low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
        chunk = self._chunk_of(piece)
        kept = {n: state.dtype for n, state in self.states.items()} if chunk is None else chunk.layout.dtypes
        names = [name for name in kept if name != MASTER and not name.endswith(SCALE_SUFFIX)]
        if any(name + SCALE_SUFFIX in kept for name in names):
            return {name: self._widened_range(chunk, name, low, high, changes) for name in names}
        if chunk is None:
            return {name: self.states[name][low:high] for name in names}
        return {name: _range_of(chunk, name, kept[name], low, high, changes) for name in names}

    def forget_remainders(self, pieces: Iterable[Piece]) -> None:
        """Before the master weights of `pieces` are written: what they are then lacks nothing."""
        if self.has_remainder and (self.states or self.chunks):
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
                return self.states
            return {key: tensor for key, tensor in chunk.open(changes).items() if key != MASTER}

        part = self if chunk is None else chunk
        return StoredRange(
            high - low,
            torch.float32,
            lambda: self._widened.open(part, stored, changes)[name][low - start : high - start],
        )


def kinds_of_block(dtype: torch.dtype, masters: Masters, new_states: NewStates) -> Kinds:
    """What is kept of a block of 256 elements beside their parameters, which are of the dtype.

    Seen on a block: an operation on a tensor of the meta device would import 33 MiB of modules.
    """
    is_mixed = masters.are_beside(dtype)
    block = torch.zeros(STATE_BLOCK_NUMEL, dtype=torch.float32 if is_mixed else dtype)
    tensors = {**({MASTER: block} if is_mixed else {}), **new_states(block)}
    return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}


def scaled(kinds: Kinds, numel: int) -> Kinds:
    """What is kept of so many elements."""
    return {name: (dtype, _scaled(of_block, numel)) for name, (dtype, of_block) in kinds.items()}


def _scaled(numel_of_block: int, numel: int) -> int:
    """How many elements a tensor has of which a block of 256 has numel_of_block: 256, or 1 for scales."""
    return -(-numel * numel_of_block // STATE_BLOCK_NUMEL)


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
