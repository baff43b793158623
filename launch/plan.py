"""What runs where: every rank of a job with its host, device, cores and environment. Starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlan:
    """One process. environment: what is set for it alone, on top of its job's; cores: empty where it is not bound."""

    rank: int
    local_rank: int
    device: str | None  # "3" or "GPU-<uuid>", as CUDA_VISIBLE_DEVICES takes it; None: no accelerator
    cores: tuple[int, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class HostPlan:
    """The ranks of one host, in the order of their local ranks."""

    name: str
    index: int
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class Plan:
    """A whole job.

    source: where the hosts come from, for the user ("hostfile hosts.txt", "SLURM job 4711").
    transport: "local", "ssh", "srun", "mpirun" or "join".
    environment: set for every rank (what the user passes on). folder: where the command runs.
    """

    source: str
    transport: str
    hosts: tuple[HostPlan, ...]
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(len(host.ranks) for host in self.hosts)
