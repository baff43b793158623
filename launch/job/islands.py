"""Groups of a job's ranks of which each goes on without the others: who is in which, and which are lost."""

from typing import Literal

from ...watch.rank_names import named
from ..hosts.host import LaunchError
from ..hosts.plan import Plan


class Islands:
    """The islands of a plan, in the order of its ranks, all of one size."""

    def __init__(self, plan: Plan, asked: int | Literal["host"]) -> None:
        """asked: ranks of an island; "host": those of a host. Raises LaunchError where they cannot be of one size."""
        sizes = {len(host.ranks) for host in plan.hosts}
        if asked == "host" and len(sizes) > 1:
            found = ", ".join(f"{host.name} {len(host.ranks)}" for host in plan.hosts)
            raise LaunchError(
                f"--islands host: expected as many ranks on each host, found {found}; name slots, or --islands N"
            )
        self.num_ranks = max(sizes) if asked == "host" else asked
        if plan.world_size % self.num_ranks:
            raise LaunchError(
                f"--islands {self.num_ranks}: expected a divisor of the {plan.world_size} ranks of the job, so that "
                "all islands have as many"
            )
        self._lost: set[int] = set()
        self._count = plan.world_size // self.num_ranks

    def of(self, rank: int) -> int:
        return rank // self.num_ranks

    def ranks(self, island: int) -> tuple[int, ...]:
        return tuple(range(island * self.num_ranks, (island + 1) * self.num_ranks))

    def is_lost(self, island: int) -> bool:
        return island in self._lost

    def lose(self, islands: set[int]) -> bool:
        """Whether any is left without these, which are lost then; else nothing changes."""
        if len(self._lost | islands) == self._count:
            return False
        self._lost |= islands
        return True

    def named(self, island: int) -> str:
        """As users read it."""
        return f"island {island} ({named(self.ranks(island))})"
