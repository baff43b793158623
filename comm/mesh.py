"""The arrangement of ranks: pipeline stages, and in each the data-parallel ranks as (replica, shard)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..launch.record import NUM_CHANNELS
from .axis import Axis, Route
from .native import NativeRoute
from .peers import Peers
from .shared_memory import SharedMemoryRoute, shared_memory_fault
from .sockets import SocketRoute
from .solo import SoloRoute
from .trail import Channel, Trail
from .world import World

logger = logging.getLogger("lowtide")

_TAGS_PER_AXIS = 1 << 21
_CHANNELS_PER_ENGINE = 4  # three axes, and the messages between pipeline stages
_NUM_ENGINES = NUM_CHANNELS // _CHANNELS_PER_ENGINE - 1  # with channels of their own in the record of the progress


@dataclass(frozen=True)
class Mesh:
    """The axes of a job, outermost first. Ranks that are next to each other are on the same shard axis.

    world of 8, pipe 2, shard 2:        pipe 0    pipe 1
                              shard ->
                      replica  0 1       4 5
                         |     2 3       6 7

    Ranks of one pipe place are data-parallel to each other: they have the same parameters and other data. Ranks that
    differ in the pipe place alone have the same data and other parameters; `peers` carries what they send each other.
    """

    world: World
    pipe: Axis
    replica: Axis
    shard: Axis
    peers: Peers

    @classmethod
    def create(cls, world: World, shard_size: int, route: str, shared_bytes: int, pipe_size: int = 1) -> Mesh:
        """Arranges the world's ranks with `pipe_size` places on the pipe axis and `shard_size` on each shard axis.

        route: auto, shared_memory, sockets or native. shared_bytes: what one engine takes of a host's shared memory;
        `auto` does without the shared-memory route where a rank cannot have as much, and the log says why. Raises
        ValueError where the sizes do not divide, or the route is not possible here.
        """
        if world.size % (pipe_size * shard_size):
            pipe = f"pipe({pipe_size}) x " if pipe_size > 1 else ""
            raise ValueError(f"{pipe}replica(?) x shard({shard_size}) != world size ({world.size}): it does not divide")
        num_replicas = world.size // (pipe_size * shard_size)
        route = _choose_route(world, route, shared_bytes)
        engine_number = _count_engines(world)
        groups = _make_groups(world, pipe_size, num_replicas, shard_size)
        data_size = num_replicas * shard_size
        pipe_rank, data_rank = divmod(world.rank, data_size)
        replica_rank, shard_rank = divmod(data_rank, shard_size)
        first = pipe_rank * data_size
        places = {
            "pipe": (pipe_rank, tuple(data_rank + data_size * p for p in range(pipe_size))),
            "replica": (replica_rank, tuple(first + shard_rank + shard_size * r for r in range(num_replicas))),
            "shard": (shard_rank, tuple(first + replica_rank * shard_size + s for s in range(shard_size))),
        }
        trail = Trail(world, engine_number)
        first_tags = [
            (_CHANNELS_PER_ENGINE * engine_number + index) % 512 * _TAGS_PER_AXIS
            for index in range(_CHANNELS_PER_ENGINE)
        ]
        first_channel = _CHANNELS_PER_ENGINE * (engine_number % _NUM_ENGINES)
        axes = {}
        for index, (name, (rank, ranks)) in enumerate(places.items()):
            channel = Channel(trail, world.progress, first_channel + index, ranks)
            route_of_axis = _make_route(world, route, rank, ranks, groups.get(name), first_tags[index], channel)
            axes[name] = Axis(name, rank, ranks, route_of_axis)
        peers = Peers(places["pipe"][1], groups.get("pipe"), first_tags[-1], world, trail, first_channel + 3)
        return cls(world, axes["pipe"], axes["replica"], axes["shard"], peers)

    @property
    def data_size(self) -> int:
        """How many data-parallel ranks there are: a global batch has as many shares."""
        return self.replica.size * self.shard.size

    @property
    def data_rank(self) -> int:
        """Which of them this rank is."""
        return self.replica.rank * self.shard.size + self.shard.rank

    def sum_small(self, values: Any, what: str) -> Any:
        """The exact sum over all ranks of a small int64 vector; also a barrier."""
        for axis in (self.shard, self.replica, self.pipe):
            values = axis.route.sum_small(values, what)
        return values

    def fence(self, what: str) -> None:
        """Returns when every rank has come here, where ranks share memory; elsewhere at once."""
        self.shard.route.fence(what)
        self.replica.route.fence(what)

    def close(self) -> None:
        """Lets go of the process groups, and leaves the world: no collective is possible afterwards."""
        for axis in (self.shard, self.replica, self.pipe):
            axis.route.close()
        self.peers.close()
        self.world.leave()


def _choose_route(world: World, route: str, shared_bytes: int) -> str:
    if world.size == 1:
        return "solo"
    if route == "native" or world.device.type != "cpu" or world.is_simulated:
        if route in ("shared_memory", "sockets") and not world.is_simulated:
            raise ValueError(f'communication.route: "{route}" is for CPU ranks; on {world.device.type} use "auto"')
        return "native"
    if route == "sockets":
        return "sockets"
    hosts = world.hosts()
    one_host = len(set(hosts)) == 1
    if route == "shared_memory":
        if not one_host:
            raise ValueError(
                'communication.route: expected all ranks on one host for "shared_memory", found '
                f'{len(set(hosts))} hosts; use "auto" or "sockets"'
            )
        return "shared_memory"
    faults = [
        (rank, fault) for rank, fault in enumerate(world.gather_objects(shared_memory_fault(shared_bytes))) if fault
    ]
    if one_host and faults and world.rank == 0:
        logger.warning('communication.route: "auto" takes sockets, since on rank %d %s', *faults[0])
    return "shared_memory" if one_host and not faults else "sockets"


def _count_engines(world: World) -> int:
    """How many engines were made on this process group before this one."""
    if world.size == 1 or world.is_simulated:
        return 0
    number = None
    if world.rank == 0:
        number = world.store.add("lowtide/engines", 1)
    return int(world.broadcast_object(number))


def _make_groups(world: World, pipe_size: int, num_replicas: int, shard_size: int) -> dict[str, dist.ProcessGroup]:
    """The process group of each axis with more than one rank: an axis over the whole world uses the default group."""
    sizes = {"pipe": pipe_size, "replica": num_replicas, "shard": shard_size}
    names = [name for name, size in sizes.items() if size > 1]
    if not names:
        return {}
    mesh = init_device_mesh(world.device.type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    return {name: mesh.get_group(name) for name in names}


def _make_route(
    world: World,
    route: str,
    rank: int,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
    first_tag: int,
    channel: Channel,
) -> Route:
    if group is None:
        return SoloRoute(world.device)
    if route == "shared_memory":
        return SharedMemoryRoute(rank, ranks, _exchange_within(group), world.timeout_seconds, channel)
    if route == "sockets":
        return SocketRoute(rank, ranks, group, first_tag, world.timeout_seconds, channel)
    return NativeRoute(rank, ranks, group, world.device, channel)


def _exchange_within(group: dist.ProcessGroup) -> Callable[[Any], list[Any]]:
    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    return exchange
