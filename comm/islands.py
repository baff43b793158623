"""Groups of ranks that are worlds of their own, and meet now and then: which one this process is of.

[Note: islands]
Ranks of one island are the whole world of an engine: no collective of a step, a norm, a checkpoint or an error leaves
it. So whatever becomes of another island, this one trains on. What islands know of each other goes through the store of
the job, and what they exchange through sockets of their own (`comm/ring.py`).

    rank of the job     0   1   2   3   4   5
    island              0   0   1   1   2   2
    rank of its world   0   1   0   1   0   1       those with the same number have the same parts of the model
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

_VARIABLE = "LOWTIDE_ISLAND_RANKS"  # set by `lowtide launch --islands`


@dataclass(frozen=True)
class Islands:
    """The islands of a job, and this process's place in them."""

    island: int
    count: int
    num_ranks: int  # of each
    store: Any  # a part of the job's, which all ranks of all islands share
    job_store: Any  # the whole of it, where a launcher says who has died
    address: str  # at which others of the job reach this process

    def gone(self, islands: tuple[int, ...]) -> dict[int, str]:
        """Those of which nothing is to be expected any more, with the reason."""
        places = [(island, store) for island in islands for store in (self.store, self.job_store)]
        found = ((island, store) for island, store in places if store.check([gone_key(island)]))
        return {island: store.get(gone_key(island)).decode() for island, store in found}

    def leave(self, why: str) -> None:
        """Nothing is to be expected of this island any more."""
        self.store.set(gone_key(self.island), why)


def gone_key(island: int) -> str:
    """Of a store: set once an island is gone; the value says why. `lowtide.comm.keeper` writes it too."""
    return f"lowtide/islands/gone/{island}"


def ranks_of_an_island(wanted: int | None) -> int:
    """How many ranks an island has: what the config says, else what the launcher says, else those of this host.

    Raises ValueError where the two differ, or the ranks of the job are no multiple.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    told = int(os.environ.get(_VARIABLE, "0"))
    if wanted is not None and told and wanted != told:
        raise ValueError(
            f"outer.ranks: expected {told}, which `lowtide launch --islands` has started for each island, found "
            f"{wanted}; leave outer.ranks out, or say the same to both"
        )
    found = wanted or told or int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if size % found:
        key = "outer.ranks" if wanted else "the ranks of a host"
        raise ValueError(
            f"{key}: expected a divisor of the {size} ranks of the job, so that all islands have as many, found {found}"
        )
    return found


def own_address(master: str) -> str:
    """The address of the interface that leads to the store's host."""
    family, kind, protocol, _, place = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
