"""The hosts of a job: names, usable slots, reports, and the way to start a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TransportName = Literal["local", "ssh", "srun", "mpirun", "join"]
Part = Literal["launcher", "agent", "rank"]

# Reported by a host: masks of accelerators, and variables that a plan sets only if they are unset.
REPORTED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


class LaunchError(ValueError):
    """A fault in the command line, a hostfile or the environment. The user sees its text without a traceback."""


@dataclass(frozen=True)
class Host:
    """A host. name: for ssh, the resource manager or the name service.

    slots: local indexes of ranks, (0, 1, 2, 3) for `slots=4`; None: as many as accelerators, at least 1. excluded:
    unused indexes, also if `slots` is None. expected_devices: accelerators that the resource manager gives the job;
    None if it does not say.
    """

    name: str
    slots: tuple[int, ...] | None = None
    excluded: tuple[int, ...] = ()
    expected_devices: int | None = None


@dataclass(frozen=True)
class Device:
    """An accelerator.

    identities: its names in a mask, first the index ("0", "GPU-8c1e..."). node: its NUMA node. parts: its MIG devices.
    """

    identities: tuple[str, ...]
    name: str  # "NVIDIA H100 80GB HBM3"
    node: int | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """A host's report for the plan.

    kind: "cuda", "hip" or "none". devices: all, masked or not. cores: usable logical processors, grouped by physical
    core. core_limit: the quota of processors at a time, None: all. nodes: NUMA node -> its usable logical
    processors. environment: the values of REPORTED_VARIABLES.
    """

    kind: Literal["cuda", "hip", "none"]
    devices: tuple[Device, ...]
    cores: tuple[tuple[int, ...], ...]
    core_limit: int | None = None
    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_cores(self) -> int:
        """The number of logical processors that a process may keep busy."""
        allowed = sum(map(len, self.cores)) or 1
        return allowed if self.core_limit is None else max(1, min(allowed, self.core_limit))


@dataclass(frozen=True)
class Rendezvous:
    """How the parts of a job started on every host by something else find each other (transport "join").

    index: of this host. The launcher of host 0 listens at `port` on all addresses, and agents on the remaining hosts
    connect to `address`:`port`. identity: names the job, equal on all hosts; no secret.
    """

    index: int
    address: str
    port: int
    identity: str


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job, in the order of their ranks.

    source: their origin, for the user ("hostfile hosts.txt", "SLURM job 4711"). nproc: ranks on each host;
    None: a rank for each slot. notes: for the user, for example flags that override a resource manager.

    part: "launcher": start agents by `transport`; with "join" listen at `rendezvous`. "agent": connect to `rendezvous`.
    "rank": this process is a rank of a running job: replace it by the command, with `rank_environment` set.
    """

    source: str
    transport: TransportName
    hosts: tuple[Host, ...]
    nproc: int | None = None
    notes: tuple[str, ...] = ()
    part: Part = "launcher"
    rendezvous: Rendezvous | None = None
    rank_environment: Mapping[str, str] = field(default_factory=dict)
