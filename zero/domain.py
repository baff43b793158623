"""Over which axes of the mesh a group of parameters lies, and where equal copies of it are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..comm import Mesh


@dataclass(frozen=True)
class Copies:
    """Some places of an axis have an equal copy, which the first of them counts in the norm, and saves.

    A weight that stages of a pipeline share: each place reduces the gradient of its own uses, and they are added up. A
    weight beside split layers: each place has the whole gradient, as it computes the same. So copies stay equal.
    """

    axis: str
    places: tuple[int, ...]
    are_added: bool = True  # the gradients of the places


@dataclass(frozen=True)
class Domain:
    """What is divided over the ranks of which axes.

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

    Axes with one rank are left out of the table. hpZ is of ZeRO++, arXiv 2306.10209, section 3.2: the ranks of a host
    have all parameters at rest, and gathers do not leave it.

    Ranks of `portioned` axes have other portions of the same tensors, as other experts, and other data; what is made of
    the data of all of them comes to each by an exchange within the model.

    Ranks that differ on `replicas` alone have summed the same gradient and hold the same states: each of them counts a
    part of it in the norm, and saves a part.
    """

    states: tuple[str, ...]  # optimizer states and master weights
    parameters: tuple[str, ...]  # full parameters at rest; the first axes of `states`, none where they are never freed
    summed: tuple[str, ...]  # the gradient: data differ there
    copies: tuple[Copies, ...] = ()
    portioned: tuple[str, ...] = ()  # data differ there, and so does what the ranks have of each tensor: experts
    last: tuple[str, ...] = ()  # those of `states` over which a gradient is summed after the others: between hosts

    def within(self, axes: tuple[str, ...]) -> Domain:
        """Of what the ranks of these axes have different portions of: nothing is divided or summed over them."""

        def without(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name not in axes)

        return replace(
            self,
            states=without(self.states),
            parameters=without(self.parameters),
            summed=without(self.summed),
            portioned=axes,
            last=without(self.last),
        )

    @property
    def tied(self) -> tuple[Copies, ...]:
        """Copies whose gradients are added up."""
        return tuple(one for one in self.copies if one.are_added)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes over which the gradient is summed, and nothing is divided."""
        return tuple(name for name in self.summed if name not in self.states)

    @property
    def folds(self) -> tuple[tuple[str, ...], ...]:
        """Axes that are taken together: each is one line of ranks."""
        return self.states, self.parameters, self.replicas, self.refreshed, self.first

    @property
    def first(self) -> tuple[str, ...]:
        """Axes of `states` over which a gradient is summed before it is over `last`; none where that is one sum."""
        return tuple(name for name in self.states if name not in self.last) if self.last else ()

    @property
    def refreshed(self) -> tuple[str, ...]:
        """Axes over which updated states have to be brought together, to be parameters at rest."""
        return self.states[len(self.parameters) :]


class DomainAxes:
    """Those over which `Domain` says that something of a group is divided, each taken together as one line of ranks."""

    def __init__(self, mesh: Mesh, domain: Domain) -> None:
        self.parameters = mesh.over(domain.parameters)
        self.states = mesh.over(domain.states)
        self.replicas = mesh.over(domain.replicas)
        self.refreshed = mesh.over(domain.refreshed)
        self.exchange_along = mesh.exchange
        """An exchange between the ranks along some axes, for who needs more of a parameter than its shard."""
        self.is_counted = _is_first(mesh, domain.copies)
        """Whether this rank is the one that counts and saves the group, of those with equal copies."""
        self.is_first_of_layers = _is_first(mesh, tuple(one for one in domain.copies if not one.are_added))
        """The same of those that have the same stage of a pipeline."""
        self.is_tied = bool(domain.tied)
        """Whether what other places have of a gradient is added to it, after the sum over ranks."""
        self.copies_are_shared = self.states.route.copies_are_shared
        """By the ranks of states: they have one copy of the parameters."""
        self.are_refreshed = self.refreshed.size > 1
        """Whether other ranks have parts of what is at rest here."""


def _is_first(mesh: Mesh, copies: tuple[Copies, ...]) -> bool:
    return all(mesh.axes[one.axis].rank == one.places[0] for one in copies)
