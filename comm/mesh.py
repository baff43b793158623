"""The ranks of a job along named axes, and the transports between them."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import count
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

_MEETING = "the agreement of all ranks on the next action"
# Room for 2 * NUM_TAGS of p2p.py, and for the names times the operations of sockets.py.
_TAGS_PER_CHANNEL = 1 << 21
_NUM_TAGGED = 512  # channels with distinct tags, since a tag has 31 bits


@dataclass(frozen=True)
class Mesh:
    """The axes of a job by name, laid out by `parallel_dims`. `peers` carries messages along the pipe axis."""

    world: World
    parallel_dims: ParallelDims
    axes: Mapping[str, Axis]
    peers: P2P
    _lines: Mapping[tuple[str, ...], Axis]  # each axis, each fold of axes, and () for this rank alone
    inner: Mapping[str, Axis]  # the inner axes of `create` that have several ranks
    error_broadcast: ErrorBroadcast
    _host: Transport | None  # between all ranks, for CPU tensors; None if the axes' transports take CPU tensors
    _host_group: dist.ProcessGroup | None

    @classmethod
    def create(
        cls,
        world: World,
        parallel_dims: ParallelDims,
        transport: str,
        shared_bytes: int,
        messages: str,
        folds: Sequence[Sequence[str]] = (),
        inner: Sequence[str] = (),
    ) -> Mesh:
        """Connect the ranks of each axis. A collective.

        transport: auto, shared_memory, sockets or native. shared_bytes: the shared memory that an engine takes on a
        host. If a rank has less, `auto` takes sockets and logs why. messages: the axis of `peers`. folds: the groups of
        several axes that `over` will be asked for. inner: axes that get a second transport for the collectives of
        layers, which run while gradients are in flight. Raises ValueError if the axes have another number of
        ranks, or if the transport is not possible here.
        """
        if parallel_dims.num_ranks != world.size:
            raise ValueError(f"{parallel_dims} = {parallel_dims.num_ranks} != world size ({world.size})")
        lines = parallel_dims.lines(folds)
        inside = parallel_dims.wide(inner)
        # Channels: each line, each inner axis, `peers`, its host transport, and the host transport of all ranks.
        transport, first, pids = _agree(world, transport, shared_bytes, len(lines) + len(inside) + 3)
        channels = count(first)
        recorder, error_broadcast = FlightRecorder(world, first), world.error_broadcast
        error_broadcast.start(world.rank, world.store, first)
        in_flight = InFlight(world, recorder.compare)
        axes, groups = {}, {}

        def connected(names: tuple[str, ...], group: dist.ProcessGroup | None) -> Axis:
            number = next(channels)
            by_place = parallel_dims.ranks(world.rank, names)
            # Terms are added by ascending rank, so a sum has the same bits however the axes are folded.
            ranks, places = tuple(sorted(by_place)), tuple(sorted(range(len(by_place)), key=by_place.__getitem__))
            rank = ranks.index(world.rank)
            channel = AxisRecorder(recorder, error_broadcast, world.progress, number, ranks)
            made: Transport
            assert group is not None  # `lines` and `wide` name axes of several ranks
            if transport == "shared_memory":
                exchange, own_pids = partial(gather_objects, group=group), [pids[member] for member in ranks]
                made = SharedMemoryTransport(rank, ranks, places, own_pids, exchange, world.timeout_seconds, channel)
            elif transport == "sockets":
                tag, timeout = _first_tag(number), world.timeout_seconds
                made = SocketTransport(rank, ranks, places, group, tag, timeout, channel)
            else:
                made = NativeTransport(rank, ranks, places, group, world.device, channel, in_flight)
            return Axis(" x ".join(names), rank, ranks, places, made)

        # To make a group is a collective of all ranks, so every rank makes all groups in this order.
        for names in lines:
            is_world = 1 < parallel_dims.size(names) == world.size  # the default group serves: a communicator less
            groups[names] = dist.group.WORLD if is_world else _new_group(world, parallel_dims, names)
            axes[names] = connected(names, groups[names])
        own = {name: connected((name,), _new_group(world, parallel_dims, (name,))) for name in inside}
        number = next(channels)
        along = (messages,)
        # If the backend waits on the host, as gloo does, the transport of the axis takes CPU tensors too.
        on_host: Transport = axes[along].transport if along in axes else SoloTransport(world.device)
        ways = groups.get(along), groups.get(along)
        if not world.waits_on_host:  # [Note: messages without tags] in p2p.py: a group for each direction
            ways = _new_group(world, parallel_dims, along), _new_group(world, parallel_dims, along)
            on_host, _ = _make_host_transport(world, parallel_dims, along, next(channels), recorder, error_broadcast)
        places = parallel_dims.ranks(world.rank, along)
        peers = P2P(places, ways, _first_tag(number), world, recorder, in_flight, number % NUM_RECORDED, on_host)
        host: Transport | None = None
        host_group: dist.ProcessGroup | None = None
        # A device's backend takes no CPU tensors, so the hosts meet over gloo.
        if not world.waits_on_host and not world.is_simulated:
            every = tuple(name for name, _ in parallel_dims.sizes)
            host, host_group = _make_host_transport(
                world, parallel_dims, every, next(channels), recorder, error_broadcast
            )
        alone = Axis("", 0, (world.rank,), (0,), SoloTransport(world.device))
        single = {name: axes.get((name,), alone) for name, _ in parallel_dims.sizes}
        return cls(world, parallel_dims, single, peers, {**axes, (): alone}, own, error_broadcast, host, host_group)

    @property
    def slot_bytes(self) -> int:
        """Bytes that this rank's transports keep between operations."""
        return sum(axis.transport.slot_bytes for axis in (*self._lines.values(), *self.inner.values()))

    def over(self, names: Sequence[str]) -> Axis:
        """Return the axis of the ranks that differ only on these axes. The first axis divides first."""
        return self._lines[self.parallel_dims.wide(names)]

    def exchange(self, names: Sequence[str]) -> Collectives:
        """Return the collectives for layers over the ranks of `over(names)`. Every call returns the same object."""
        wide = self.parallel_dims.wide(names)
        if wide not in self._exchanges:
            own = self.inner.get(wide[0]) if len(wide) == 1 else None
            self._exchanges[wide] = Collectives(own or self._lines[wide])
        return self._exchanges[wide]

    @cached_property
    def _exchanges(self) -> dict[tuple[str, ...], Collectives]:
        return {}

    def place(self, name: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.parallel_dims.place(self.world.rank, (name,))

    @cached_property
    def data_size(self) -> int:
        """The number of data-parallel ranks: a global batch has as many shares."""
        return self.parallel_dims.size(self.parallel_dims.data)

    @cached_property
    def data_rank(self) -> int:
        """This rank's number among the data-parallel ranks."""
        return self.parallel_dims.place(self.world.rank, self.parallel_dims.data)

    @cached_property
    def has_whole(self) -> bool:
        """True if nothing is split over stages or within layers.

        Then this rank's parameters, together with their shards on data-parallel ranks, are the whole model.
        """
        return self.parallel_dims.size(self.parallel_dims.summed) == self.world.size

    @cached_property
    def is_first(self) -> bool:
        """True if this rank is the first among the ranks of its pipeline stage."""
        same = self.parallel_dims.summed + self.parallel_dims.layers
        return self.parallel_dims.place(self.world.rank, same) == 0

    @cached_property
    def speaks(self) -> bool:
        """True if this rank reports values that are equal on all ranks that split the same layers, like the loss."""
        return self.parallel_dims.place(self.world.rank, self.parallel_dims.layers) == 0

    @cached_property
    def _summed(self) -> list[Axis]:
        """Axes with several ranks over which gradients are summed, the last axis first."""
        return [self.axes[name] for name in reversed(self.parallel_dims.wide(self.parallel_dims.summed))]

    def sum_small(self, values: Any, what: str) -> Any:
        """Sum a small int64 vector over all ranks. Overwrites `values`. Also a barrier."""
        # Along each axis in turn. The sum of integers is that of all ranks, and needs no group of all ranks.
        for name, size in reversed(self.parallel_dims.sizes):
            if size > 1:
                values = self.axes[name].transport.sum_small(values, what)
        return values

    def gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, or only this rank's value if all are equal. A collective on the
        host.

        Raises CollectiveError if a rank arrives after an error in a pass that other ranks have not had.
        """
        if self.world.size == 1 or self.world.is_simulated:
            return [value]
        # Equal values cost a single small sum: all x are equal if n * sum(x^2) = (sum x)^2.
        # The number of errors counts as part of the value. So a rank that failed in a pass is seen if the values agree.
        error = self.error_broadcast.last
        digest = int.from_bytes(hashlib.blake2b(pickle.dumps((error[0], value)), digest_size=6).digest(), "little")
        halves = digest & 0xFFFFFF, digest >> 24  # 24 bits each, so sums of squares fit 64 bits
        mine = torch.tensor([power for half in halves for power in (half, half * half)], dtype=torch.int64)
        sums = (self.sum_small if self._host is None else self._host.sum_small)(mine, _MEETING)
        low, low_squares, high, high_squares = sums.tolist()
        if self.world.size * low_squares == low * low and self.world.size * high_squares == high * high:
            return [value]
        reports = self.world.gather_objects((error, value), self._host_group)
        self.error_broadcast.check_same([one for one, _ in reports], _MEETING)
        return [one for _, one in reports]

    def fence(self, what: str) -> None:
        """Wait until every rank with the same parameters has arrived, if they share memory. Else return at once."""
        for axis in self._summed:
            axis.transport.fence(what)

    def close(self) -> None:
        """Drop the process groups and leave the world. No collective is possible afterwards."""
        for axis in (*self._lines.values(), *self.inner.values()):
            axis.transport.close()
        if self._host is not None:
            self._host.close()
        self.peers.close()
        # Last: the default group must have no more references when it is destroyed. [Note: threads at exit] in world.py
        self.world.leave()


def transport_for(wanted: str, device: str, num_ranks: int, num_hosts: int) -> str:
    """Choose the transport: solo, shared_memory, sockets or native.

    wanted: auto, shared_memory, sockets or native. device: its type. Raises ValueError if `wanted` is not possible
    here.
    """
    if num_ranks == 1:
        return "solo"
    if device != "cpu" and wanted in ("shared_memory", "sockets"):
        raise ValueError(f'communication.transport: "{wanted}" is for CPU ranks. On {device} use "auto".')
    if wanted == "shared_memory" and num_hosts > 1:
        raise ValueError(
            'communication.transport: expected all ranks on one host for "shared_memory", found '
            f'{num_hosts} hosts. Use "auto" or "sockets".'
        )
    if wanted != "auto":
        return wanted
    if device != "cpu":
        return "native"
    return "shared_memory" if num_hosts == 1 else "sockets"


def _agree(world: World, wanted: str, shared_bytes: int, num_channels: int) -> tuple[str, int, list[int]]:
    """Agree on the transport, the first of `num_channels` unused channel numbers, and the process ids by rank."""
    if world.size == 1 or world.is_simulated:
        # A simulated world has no further rank to agree with. torch's fake group stands for a backend.
        return "solo" if world.size == 1 else "native", 0, []
    transport = transport_for(wanted, world.device.type, world.size, world.num_hosts)
    may_lack_room = transport == "shared_memory" and wanted == "auto"
    own_fault = shared_memory_fault(shared_bytes) if may_lack_room else ""
    # Numbers that no earlier engine of these processes has: two engines may send messages at the same time.
    end = world.store.add("lowtide/channels", num_channels) if world.rank == 0 else 0
    reports = world.gather_objects((own_fault, end, os.getpid()))
    faults = [(rank, fault) for rank, (fault, _, _) in enumerate(reports) if fault]
    if faults and world.rank == 0:
        logger.warning('communication.transport: "auto" uses sockets, because on rank %d %s', *faults[0])
    return "sockets" if faults else transport, reports[0][1] - num_channels, [pid for _, _, pid in reports]


def _first_tag(number: int) -> int:
    return number % _NUM_TAGGED * _TAGS_PER_CHANNEL


def _make_host_transport(
    world: World,
    parallel_dims: ParallelDims,
    names: Sequence[str],
    number: int,
    recorder: FlightRecorder,
    error_broadcast: ErrorBroadcast,
) -> tuple[Transport, dist.ProcessGroup | None]:
    """Make a transport for CPU tensors beside the transports of a device: gloo messages, without reserved buffers."""
    ranks = tuple(sorted(parallel_dims.ranks(world.rank, names)))
    group = _new_group(world, parallel_dims, names, backend="gloo")
    if group is None:
        return SoloTransport(torch.device("cpu")), None
    channel = AxisRecorder(recorder, error_broadcast, world.progress, number, ranks)
    rank, places = ranks.index(world.rank), tuple(range(len(ranks)))
    transport = SocketTransport(rank, ranks, places, group, _first_tag(number), world.timeout_seconds, channel)
    return transport, group


def _new_group(
    world: World, parallel_dims: ParallelDims, names: Sequence[str], backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make a process group for this rank's axis. None if the axis has a single rank. A collective.

    backend: None takes the default group's backend.
    """
    if parallel_dims.size(names) == 1:
        return None
    # Every rank makes the groups of all lines, in this order: torch numbers groups as they are made, and the members
    # of a group find each other by its number.
    every = dict.fromkeys(tuple(sorted(parallel_dims.ranks(rank, names))) for rank in range(world.size))
    make: Callable[..., tuple[dist.ProcessGroup, Any]] = dist.new_subgroups_by_enumeration
    timeout = timedelta(seconds=world.timeout_seconds)
    with nullcontext() if world.is_simulated else world.waiting("the connection of the ranks of an axis"):
        return make([list(ranks) for ranks in every], timeout=timeout, backend=backend)[0]
