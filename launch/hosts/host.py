"""The machines of a job: how each is named, what the job may use of it, what it reports, and who starts what there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AgentTransport = Literal["local", "ssh", "srun", "mpirun", "join"]
Part = Literal["launcher", "agent", "rank"]

# What a host reports of its environment: masks of accelerators, and what a plan sets only where it is not set.
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
    """A fault in the command line, a hostfile or the environment: its text is for the user, without a traceback."""


@dataclass(frozen=True)
class Host:
    """name: as ssh, the resource manager or the name service knows it.

    slots: local indexes, one rank each, (0, 1, 2, 3) for `slots=4`; None: as many as the host has accelerators, one
    where it has none. excluded: indexes that are not used, also where `slots` is None. expected_devices: how many
    accelerators the resource manager says the job has there, where it says so.
    """

    name: str
    slots: tuple[int, ...] | None = None
    excluded: tuple[int, ...] = ()
    expected_devices: int | None = None


@dataclass(frozen=True)
class Device:
    """An accelerator.

    identities: what a mask may call it, its index first ("0", "GPU-8c1e..."). node: its NUMA node. parts: the MIG
    devices that it is cut into.
    """

    identities: tuple[str, ...]
    name: str  # "NVIDIA H100 80GB HBM3"
    node: int | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """What a host says about itself to whoever plans.

    kind: "cuda", "hip" or "none". devices: all that are there, masked or not. cores: the logical processors that a
    process started there may use, those of one physical core next to each other, in groups. core_limit: how many of
    them at a time (a quota), None: all. nodes: NUMA node -> its logical processors that may be used. environment: those
    of REPORTED_VARIABLES that are set there.
    """

    kind: Literal["cuda", "hip", "none"]
    devices: tuple[Device, ...]
    cores: tuple[tuple[int, ...], ...]
    core_limit: int | None = None
    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_cores(self) -> int:
        """How many logical processors a process started there may keep busy."""
        allowed = sum(map(len, self.cores)) or 1
        return allowed if self.core_limit is None else max(1, min(allowed, self.core_limit))


@dataclass(frozen=True)
class Rendezvous:
    """Where the parts of a job that someone else started on every host find each other (transport "join").

    index: this host's place among the hosts. The launcher of host 0 listens at `port` on all its addresses, the agents
    of the others connect to `address`:`port`. identity: names the job, equal on all its hosts; no secret.
    """

    index: int
    address: str
    port: int
    identity: str


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job, in the order of their ranks.

    source: where they come from, for the user ("hostfile hosts.txt", "SLURM job 4711"). nproc: ranks on each host,
    None: one a slot. notes: what the user should know, such as flags that win over what a resource manager says.

    part: "launcher": start agents by `transport`, and with "join" listen at `rendezvous`. "agent": connect to
    `rendezvous`.
    "rank": this process is one rank of a job that is started already; run the command in its place, with
    `rank_environment` set.
    """

    source: str
    transport: AgentTransport
    hosts: tuple[Host, ...]
    nproc: int | None = None
    notes: tuple[str, ...] = ()
    part: Part = "launcher"
    rendezvous: Rendezvous | None = None
    rank_environment: Mapping[str, str] = field(default_factory=dict)
