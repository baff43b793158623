"""The mesh axes over which a group of parameters is sharded, reduced or replicated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..comm import Mesh


@dataclass(frozen=True)
class Replicas:
    """Coordinates of an axis that hold equal copies of a group. The first counts it in the norm and saves it.

    A weight shared by pipeline stages: each stage reduces the gradient of its uses, and the stages add them up. A
    weight beside split layers: each rank computes the whole gradient, so copies stay equal without a sum.
    """

    axis: str
    places: tuple[int, ...]
    are_added: bool = True  # whether the gradients of the copies are added up


@dataclass(frozen=True)
class ShardingSpec:
    """The axes over which a group's states, parameters and gradients are divided.

    |                      | states           | parameters      | summed           | copies |
    |----------------------|------------------|-----------------|------------------|--------|
    | stage 0              |                  |                 | replica          |        |
    | stage 1, 2           | shard            |                 | shard            |        |
    | stage 3              | shard            | shard           | shard            |        |
    | hybrid, stage 3      | shard            | shard           | replica, shard   |        |
    | hpZ, stage 3         | shard, secondary | shard           | secondary, shard |        |
    | sequences, stage 3   | shard, sequence  | shard, sequence | shard, sequence  |        |
    | not split, stage 3   | shard            | shard           | shard            | tensor |
    | not an expert's, 3   | shard, expert    | shard, expert   | shard, expert    |        |
    | an expert's, stage 3 | shard            | shard           | shard            |        |

    The table omits axes with one rank. hpZ (ZeRO++, arXiv 2306.10209, section 3.2): the ranks of a host hold all
    parameters between uses, and gathers stay within the host.

    Ranks along `partitioned` axes hold different parts of the same tensors, for example different experts, and see
    different data. The model itself exchanges activations between them.

    Ranks along `replicas` have summed the same gradient and hold the same states. Each counts a part of it in the norm,
    and saves a part.
    """

    states: tuple[str, ...]  # optimizer states and master weights
    parameters: tuple[str, ...]  # parameters between uses: the first axes of `states`, or none if never freed
    summed: tuple[str, ...]  # the gradient: data differ along these axes
    copies: tuple[Replicas, ...] = ()
    partitioned: tuple[str, ...] = ()  # data and parts of tensors differ along these axes: experts
    last: tuple[str, ...] = ()  # the axes of `states` that are summed last: between hosts

    def within(self, axes: tuple[str, ...]) -> ShardingSpec:
        """Return the spec of parameters that the ranks of `axes` divide: no sharding or sum over these axes."""

        def without(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name not in axes)

        return replace(
            self,
            states=without(self.states),
            parameters=without(self.parameters),
            summed=without(self.summed),
            partitioned=axes,
            last=without(self.last),
        )

    @property
    def tied(self) -> tuple[Replicas, ...]:
        """Copies whose gradients are added up."""
        return tuple(copies for copies in self.copies if copies.are_added)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes over which the gradient is summed and nothing is divided."""
        return tuple(name for name in self.summed if name not in self.states)

    def owning_axes(self, states_size: int) -> tuple[str, ...]:
        """Return the axes whose ranks own whole matrices: those that divide the states, if they have several ranks."""
        return self.states if states_size > 1 else self.replicas

    @property
    def folds(self) -> tuple[tuple[str, ...], ...]:
        """Axes that are used together as a single process group."""
        return self.states, self.parameters, self.replicas, self.refreshed, self.first

    @property
    def first(self) -> tuple[str, ...]:
        """Axes of `states` that a gradient is summed over before `last`. Empty if it is a single sum."""
        return tuple(name for name in self.states if name not in self.last) if self.last else ()

    @property
    def refreshed(self) -> tuple[str, ...]:
        """Axes over which updated shards are gathered, to be the parameters between uses."""
        return self.states[len(self.parameters) :]


class ShardingAxes:
    """The process groups of a `ShardingSpec`."""

    def __init__(self, mesh: Mesh, sharding: ShardingSpec) -> None:
        self.parameters = mesh.over(sharding.parameters)
        self.states = mesh.over(sharding.states)
        self.replicas = mesh.over(sharding.replicas)
        self.refreshed = mesh.over(sharding.refreshed)
        self.exchange_along = mesh.exchange
        """Collectives between the ranks along some axes, for updates that need more of a parameter than its shard."""
        self.is_counted = _is_first(mesh, sharding.copies)
        """Whether this rank counts and saves the group, among the ranks with equal copies."""
        self.is_first_of_layers = _is_first(mesh, tuple(copies for copies in sharding.copies if not copies.are_added))
        """The same among the ranks of a pipeline stage."""
        self.is_tied = bool(sharding.tied)
        """Whether gradients of copies are added after the sum over ranks."""
        self.copies_are_shared = self.states.transport.copies_are_shared
        """Whether the ranks of `states` share a single copy of the parameters in host memory."""
        self.are_refreshed = self.refreshed.size > 1
        """Whether parts of the parameters that rest here are updated by different ranks."""


def _is_first(mesh: Mesh, copies: tuple[Replicas, ...]) -> bool:
    return all(mesh.axes[each.axis].rank == each.places[0] for each in copies)
