"""The ranks of a job along named axes, and the routes between them."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .axis import Axis, SoloTransport, Transport
from .collectives import Collectives
from .errors import ErrorBroadcast
from .in_flight import NUM_RECORDED, AxisRecorder, FlightRecorder, InFlight
from .native import NativeTransport
from .p2p import P2P
from .parallel_dims import ParallelDims
from .shared_memory import SharedMemoryTransport
from .shared_segment import shared_memory_fault
from .sockets import SocketTransport
from .world import World, gather_objects

logger = logging.getLogger("lowtide")

T = TypeVar("T")

_MEETING = "the agreement of all ranks on what comes next"
_TAGS_PER_CHANNEL = 1 << 21
_NUM_TAGGED = 512  # channels at a time; tags are numbers of 31 bits


@dataclass(frozen=True)
class Mesh:
    """The axes of a job by name, as `arrangement` has them; `peers` carries messages along one of them."""

    world: World
    arrangement: ParallelDims
    axes: Mapping[str, Axis]
    peers: P2P
    _lines: Mapping[tuple[str, ...], Axis]  # each axis, those that are folded of several, and one of this rank alone
    inner: Mapping[str, Axis]  # those of `create`, with several ranks
    raised: ErrorBroadcast  # what ranks tell each other of errors in the middle of a call
    _host: Transport | None  # between all ranks, for values of the host; None: the axes' own are
    _host_group: dist.ProcessGroup | None

    @classmethod
    def create(
        cls,
        world: World,
        arrangement: ParallelDims,
        route: str,
        shared_bytes: int,
        messages: str,
        folds: Sequence[Sequence[str]] = (),
        inner: Sequence[str] = (),
    ) -> Mesh:
        """Connects the ranks of each axis. A collective.

        route: auto, shared_memory, sockets or native. shared_bytes: what one engine takes of a host's shared memory;
        `auto` does without the shared-memory route where a rank cannot have as much, and the log says why. messages:
        the axis of `peers`. folds: what `over` will be asked for with more than one axis. inner: axes with a route of
        its own for what models exchange while gradients are on their way.
        Raises ValueError where the arrangement is of another number of ranks, or the route is not possible here.
        """
        if arrangement.num_ranks != world.size:
            raise ValueError(f"{arrangement} = {arrangement.num_ranks} != world size ({world.size})")
        lines = arrangement.lines(folds)
        inside = arrangement.wide(inner)
        route, first, pids = _agree(world, route, shared_bytes, len(lines) + 3 + len(inside))
        trail, raised = FlightRecorder(world, first), world.raised
        raised.start(world.rank, world.store, first)
        works = InFlight(world, trail.compare)
        axes, groups = {}, {}

        def connected(number: int, names: tuple[str, ...], group: dist.ProcessGroup | None) -> Axis:
            by_place = arrangement.ranks(world.rank, names)
            ranks, places = tuple(sorted(by_place)), tuple(sorted(range(len(by_place)), key=by_place.__getitem__))
            rank = ranks.index(world.rank)
            channel = AxisRecorder(trail, raised, world.progress, number, ranks)
            made = _make_route(world, route, rank, ranks, places, pids, group, _first_tag(number), channel, works)
            return Axis(" x ".join(names), rank, ranks, places, made)

        for number, names in enumerate(lines, first):
            groups[names] = _make_group(world, arrangement, names)
            axes[names] = connected(number, names, groups[names])
        own = {
            name: connected(number, (name,), _new_group(world, arrangement, (name,)))
            for number, name in enumerate(inside, first + len(lines) + 2)
        }
        number = first + len(lines)
        along = (messages,)
        on_host: Transport = axes[along].route if along in axes else SoloTransport(world.device)
        ways = groups.get(along), groups.get(along)
        if not world.waits_on_host:  # no tags: see `P2P`
            ways = _new_group(world, arrangement, along), _new_group(world, arrangement, along)
            on_host, _ = _make_host_route(world, arrangement, along, number + 1, trail, raised)
        places = arrangement.ranks(world.rank, along)
        peers = P2P(places, ways, _first_tag(number), world, trail, works, number % NUM_RECORDED, on_host)
        host: Transport | None = None
        host_group: dist.ProcessGroup | None = None
        if not world.waits_on_host and not world.is_simulated:
            every = tuple(name for name, _ in arrangement.sizes)
            after = number + 2 + len(inside)
            host, host_group = _make_host_route(world, arrangement, every, after, trail, raised)
        alone = Axis("", 0, (world.rank,), (0,), SoloTransport(world.device))
        single = {name: axes.get((name,), alone) for name, _ in arrangement.sizes}
        return cls(world, arrangement, single, peers, {**axes, (): alone}, own, raised, host, host_group)

    @property
    def slot_bytes(self) -> int:
        """What this rank keeps for messages between operations."""
        routes = {id(axis.route): axis.route for axis in (*self._lines.values(), *self.inner.values())}
        return sum(route.slot_bytes for route in routes.values())

    def over(self, names: Sequence[str]) -> Axis:
        """The axis of all ranks that differ on these axes alone, the first of them dividing first."""
        return self._lines[self.arrangement.wide(names)]

    def exchange(self, names: Sequence[str]) -> Collectives:
        """Of tensors that come in the middle of a model, over the ranks of `over(names)`: the same one each time."""
        wide = self.arrangement.wide(names)
        if wide not in self._exchanges:
            own = self.inner.get(wide[0]) if len(wide) == 1 else None
            self._exchanges[wide] = Collectives(own or self._lines[wide])
        return self._exchanges[wide]

    @cached_property
    def _exchanges(self) -> dict[tuple[str, ...], Collectives]:
        return {}

    def place(self, name: str) -> int:
        """Where on an axis this rank is."""
        return self.arrangement.place(self.world.rank, (name,))

    @cached_property
    def data_size(self) -> int:
        """How many data-parallel ranks there are: a global batch has as many shares."""
        return self.arrangement.size(self.arrangement.data)

    @cached_property
    def data_rank(self) -> int:
        """Which of them this rank is."""
        return self.arrangement.place(self.world.rank, self.arrangement.data)

    @cached_property
    def has_whole(self) -> bool:
        """Whether this rank's parameters, with what data-parallel ranks have of them, are the model's: nothing is split
        over stages or within layers."""
        return self.arrangement.size(self.arrangement.summed) == self.world.size

    @cached_property
    def is_first(self) -> bool:
        """Whether this rank is the first of those with the same layers, or parts of them: of a pipeline's place."""
        same = self.arrangement.summed + self.arrangement.layers
        return self.arrangement.place(self.world.rank, same) == 0

    @cached_property
    def speaks(self) -> bool:
        """Whether this rank is the one that tells of what is alike on all that split the same layers, as a loss is."""
        return self.arrangement.place(self.world.rank, self.arrangement.layers) == 0

    @cached_property
    def _summed(self) -> list[Axis]:
        """Those with several ranks over which gradients are summed, the last first."""
        return [self.axes[name] for name in reversed(self.arrangement.wide(self.arrangement.summed))]

    def sum_small(self, values: Any, what: str) -> Any:
        """The exact sum over all ranks of a small int64 vector, which is used up; also a barrier."""
        for name, size in reversed(self.arrangement.sizes):
            if size > 1:
                values = self.axes[name].route.sum_small(values, what)
        return values

    def meet(self, value: T) -> list[T]:
        """The values of all ranks, by rank; only this rank's where all are equal. A collective, on the host.

        Raises CollectiveError where a rank comes here after an error in a pass that other ranks have not had.

        Equal values cost one small sum: all x are equal where n * sum(x^2) = (sum x)^2.
        """
        if self.world.size == 1 or self.world.is_simulated:
            return [value]
        error = self.raised.last
        digest = int.from_bytes(hashlib.blake2b(pickle.dumps((error[0], value)), digest_size=6).digest(), "little")
        halves = digest & 0xFFFFFF, digest >> 24  # whose squares are summed in 64 bits
        mine = torch.tensor([power for half in halves for power in (half, half * half)], dtype=torch.int64)
        sums = (self.sum_small if self._host is None else self._host.sum_small)(mine, _MEETING)
        low, low_squares, high, high_squares = sums.tolist()
        if self.world.size * low_squares == low * low and self.world.size * high_squares == high * high:
            return [value]
        told = gather_objects((error, value), self._host_group)
        self.raised.check_same([one for one, _ in told], _MEETING)
        return [one for _, one in told]

    def fence(self, what: str) -> None:
        """Returns when every rank with the same parameters has come here, where memory is shared; elsewhere at once."""
        for axis in self._summed:
            axis.route.fence(what)

    def close(self) -> None:
        """Lets go of the process groups, and leaves the world: no collective is possible afterwards."""
        for axis in (*self._lines.values(), *self.inner.values()):
            axis.route.close()
        if self._host is not None:
            self._host.close()
        self.peers.close()
        self.world.leave()


def route_for(wanted: str, device: str, num_ranks: int, num_hosts: int) -> str:
    """solo, shared_memory, sockets or native: what ranks take where there is room for it.

    wanted: auto, shared_memory, sockets or native. device: its type. Raises ValueError where that is not possible.
    """
    if num_ranks == 1:
        return "solo"
    if device != "cpu" and wanted in ("shared_memory", "sockets"):
        raise ValueError(f'communication.route: "{wanted}" is for CPU ranks; on {device} use "auto"')
    if wanted == "shared_memory" and num_hosts > 1:
        raise ValueError(
            'communication.route: expected all ranks on one host for "shared_memory", found '
            f'{num_hosts} hosts; use "auto" or "sockets"'
        )
    if wanted != "auto":
        return wanted
    if device != "cpu":
        return "native"
    return "shared_memory" if num_hosts == 1 else "sockets"


def _agree(world: World, wanted: str, shared_bytes: int, num_channels: int) -> tuple[str, int, list[int]]:
    """The route, the first of `num_channels` numbers that no other channel has had on this process group, and the
    processes of all ranks."""
    if world.size == 1 or world.is_simulated:
        return "solo" if world.size == 1 else "native", 0, []
    route = route_for(wanted, world.device.type, world.size, world.num_hosts)
    may_lack_room = route == "shared_memory" and wanted == "auto"
    own_fault = shared_memory_fault(shared_bytes) if may_lack_room else ""
    end = world.store.add("lowtide/channels", num_channels) if world.rank == 0 else 0
    told = world.gather_objects((own_fault, end, os.getpid()))
    faults = [(rank, fault) for rank, (fault, _, _) in enumerate(told) if fault]
    if faults and world.rank == 0:
        logger.warning('communication.route: "auto" takes sockets, since on rank %d %s', *faults[0])
    return "sockets" if faults else route, told[0][1] - num_channels, [pid for _, _, pid in told]


def _first_tag(number: int) -> int:
    return number % _NUM_TAGGED * _TAGS_PER_CHANNEL


def _make_group(world: World, arrangement: ParallelDims, names: Sequence[str]) -> dist.ProcessGroup | None:
    """The process group of this rank's axis; None where it is alone on it, the default one where all ranks are."""
    if 1 < arrangement.size(names) == world.size:
        return dist.group.WORLD
    return _new_group(world, arrangement, names)


def _make_host_route(
    world: World,
    arrangement: ParallelDims,
    names: Sequence[str],
    number: int,
    trail: FlightRecorder,
    raised: ErrorBroadcast,
) -> tuple[Transport, dist.ProcessGroup | None]:
    """For values of the CPU, beside the routes of a device. Messages of gloo, which need no buffers of their own."""
    ranks = tuple(sorted(arrangement.ranks(world.rank, names)))
    group = _new_group(world, arrangement, names, backend="gloo")
    if group is None:
        return SoloTransport(torch.device("cpu")), None
    channel = AxisRecorder(trail, raised, world.progress, number, ranks)
    rank, places = ranks.index(world.rank), tuple(range(len(ranks)))
    route = SocketTransport(rank, ranks, places, group, _first_tag(number), world.timeout_seconds, channel)
    return route, group


def _new_group(
    world: World, arrangement: ParallelDims, names: Sequence[str], backend: str | None = None
) -> dist.ProcessGroup | None:
    """One of its own for this rank's axis; None where it is alone on it. A collective. backend: the default one's."""
    if arrangement.size(names) == 1:
        return None
    every = dict.fromkeys(tuple(sorted(arrangement.ranks(rank, names))) for rank in range(world.size))
    make: Callable[..., tuple[dist.ProcessGroup, Any]] = dist.new_subgroups_by_enumeration
    timeout = timedelta(seconds=world.timeout_seconds)
    return make([list(ranks) for ranks in every], timeout=timeout, backend=backend)[0]


def _make_route(
    world: World,
    route: str,
    rank: int,
    ranks: tuple[int, ...],
    places: tuple[int, ...],
    pids: Sequence[int],
    group: dist.ProcessGroup | None,
    first_tag: int,
    channel: AxisRecorder,
    works: InFlight,
) -> Transport:
    if group is None:
        return SoloTransport(world.device)
    if route == "shared_memory":
        exchange = partial(gather_objects, group=group)
        own_pids = [pids[member] for member in ranks]
        return SharedMemoryTransport(rank, ranks, places, own_pids, exchange, world.timeout_seconds, channel)
    if route == "sockets":
        return SocketTransport(rank, ranks, places, group, first_tag, world.timeout_seconds, channel)
    return NativeTransport(rank, ranks, places, group, world.device, channel, works)
