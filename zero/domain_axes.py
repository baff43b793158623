"""The axes of a mesh that a domain names, and which of their ranks this one is."""

from __future__ import annotations

from ..comm import Mesh
from .domain import Copies, Domain


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
