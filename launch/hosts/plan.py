"""Plan a job: each rank with its host, device, cores and environment. Starts nothing.

[Note: devices]
A rank uses device LOCAL_RANK of those it sees, as scripts for torchrun expect. So all ranks of a host get the same
mask. It is set only if slots were chosen (`slots=`, --include, --exclude). Otherwise the ranks see what the host's mask
leaves, and use the first devices.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...watch.waiting import rank_range
from .environment import is_secret, shown_value
from .host import Allocation, Host, HostReport, LaunchError
from .numa import own_cores, rank_nodes
from .report import Visible, visible

Bind = Literal["auto", "none", "numa", "cores"]

MAX_SHOWN_RANKS = 64
LOCAL_RANK_WORD = "--local_rank=$LOCAL_RANK"  # in a command: replaced by each rank's number
_NUMBERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
)
_UNSET_DEFAULTS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# Gathered units and gradients of several sizes come and go, and expandable segments let a size reuse the memory of the
# last. torch reads the old name if the new one is unset. Source: torch's notes on CUDA, "Memory management".
_ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_SEGMENTS = "expandable_segments:True"


@dataclass(frozen=True)
class RankPlan:
    """A rank. environment: set for it alone, over its job's. cores: empty if it is not bound."""

    rank: int
    local_rank: int
    device: str | None  # "3" or "GPU-<uuid>", as CUDA_VISIBLE_DEVICES takes it; None: no accelerator
    cores: tuple[int, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class HostPlan:
    """The ranks of a host, by local rank."""

    name: str
    index: int
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class JobPlan:
    """A whole job.

    source: the origin of the hosts, for the user ("hostfile hosts.txt", "SLURM job 4711").
    transport: "local", "ssh", "srun", "mpirun" or "join".
    environment: of every rank, from the user. folder: the working folder of the command.
    master_address: of the ranks' store, as all hosts reach it; MASTER_ADDR of every rank. MASTER_PORT is known only
    when rank 0's host has bound it. notes: for the user, see Allocation.
    """

    source: str
    transport: str
    hosts: tuple[HostPlan, ...]
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    master_address: str = "127.0.0.1"
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)


def make_plan(
    allocation: Allocation,
    reports: Sequence[HostReport],
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    bind: Bind = "auto",
    master_address: str | None = None,
) -> JobPlan:
    """Plan a job.

    reports: of the hosts of `allocation`, in order. environment: see `job_environment`. A rank's environment gets
    torchrun's variables (RANK ... MASTER_ADDR) except MASTER_PORT, its host's device mask if slots were chosen, and
    OMP_NUM_THREADS, PYTHONUNBUFFERED and PYTHONFAULTHANDLER unless set.

    bind: "numa": each rank to the cores of its device's NUMA node; "cores": to its share of these; "auto": "numa" if
    the host has several and its accelerators tell theirs. master_address: None: 127.0.0.1 for a single host, else the
    meeting or the first host's name. Raises LaunchError if a host has too few resources.
    """
    if len(reports) != len(allocation.hosts):
        raise LaunchError(f"{allocation.source} has {len(allocation.hosts)} hosts, {len(reports)} have reported")
    address = master_address or _master_address(allocation)
    hosts: list[HostPlan] = []
    notes = [*allocation.notes, *_notes(allocation.hosts, reports, environment)]
    for index, (host, report) in enumerate(zip(allocation.hosts, reports, strict=True)):
        ranks = _ranks_of_host(host, report, allocation.nproc, {**report.environment, **environment}, bind)
        hosts.append(HostPlan(host.name, index, ranks))
    if any(_ALLOCATOR in rank.environment for host in hosts for rank in host.ranks):
        notes.append(f"{_ALLOCATOR}={_SEGMENTS} is set for ranks with a CUDA device, since it was unset")
    plan = JobPlan(
        allocation.source,
        allocation.transport,
        tuple(hosts),
        tuple(command),
        folder,
        dict(environment),
        address,
        tuple(notes),
    )
    # In a second step: a rank's number and WORLD_SIZE are known when all hosts have their ranks.
    return replace(plan, hosts=_numbered(plan))


def command_of(command: Sequence[str], local_rank: str) -> list[str]:
    """Return the command of a rank, with its number for LOCAL_RANK_WORD."""
    return [f"--local_rank={local_rank}" if word == LOCAL_RANK_WORD else word for word in command]


def printed_plan(plan: JobPlan) -> str:
    """Return the text of `--print-plan`: hosts, ranks, devices, cores, command and environment.

    It has a row for each rank, or for each host above MAX_SHOWN_RANKS. Secrets, by the name of the variable or option,
    are hidden.
    """
    num_hosts = len(plan.hosts)
    lines = [
        f"{num_hosts} host{'s' * (num_hosts > 1)}, {plan.world_size} rank{'s' * (plan.world_size > 1)}; "
        f"hosts from {plan.source}; transport {plan.transport}",
        *(f"note: {note}" for note in plan.notes),
        "",
        *_table(_rows(plan)),
        "",
        f"folder:   {plan.folder}",
        f"command:  {shown_command(plan.command)}",
        f"each rank has RANK, LOCAL_RANK, WORLD_SIZE={plan.world_size}, LOCAL_WORLD_SIZE, GROUP_RANK, "
        f"GROUP_WORLD_SIZE={num_hosts}, MASTER_ADDR={plan.master_address}, MASTER_PORT (bound at the start)",
    ]
    for text, variables in (("every rank", plan.environment), *_own_variables(plan)):
        if variables:
            lines.append(f"environment of {text}:")
            lines += _shown_variables(variables)
    return "\n".join(lines)


def printed_rank(allocation: Allocation, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the text of `--print-plan` if this process is itself a rank (`Allocation.part`)."""
    lines = [f"1 rank; from {allocation.source}", *(f"note: {note}" for note in allocation.notes)]
    lines += ["", f"command:  {shown_command(command)}"]
    if variables := {**environment, **allocation.rank_environment}:
        lines += ["variables added to the environment:", *_shown_variables(variables)]
    return "\n".join(lines)


def _shown_variables(variables: Mapping[str, str]) -> list[str]:
    return [f"  {name}={_quoted(shown_value(name, value))}" for name, value in sorted(variables.items())]


def _master_address(allocation: Allocation) -> str:
    if len(allocation.hosts) == 1:
        return "127.0.0.1"
    if allocation.rendezvous is not None:
        return allocation.rendezvous.address
    return allocation.hosts[0].name.rpartition("@")[2]


def _notes(hosts: Sequence[Host], reports: Sequence[HostReport], environment: Mapping[str, str]) -> list[str]:
    """Return notes on settings that are possible but probably unintended."""
    notes: list[str] = []
    counts = [
        len(visible(report.kind, report.devices, {**report.environment, **environment}).entries) for report in reports
    ]
    for host, count in zip(hosts, counts, strict=True):
        if host.expected_devices not in (None, count) and host.slots is None:
            notes.append(
                f"{host.name}: the resource manager gives the job {host.expected_devices} accelerators, but a process "
                f"can use {count}"
            )
    if 0 in counts and any(counts):
        without = [host.name for host, count in zip(hosts, counts, strict=True) if not count]
        notes.append(f"{', '.join(without)}: no usable accelerator, while other hosts have some")
    return notes


def _ranks_of_host(
    host: Host, report: HostReport, nproc: int | None, environment: Mapping[str, str], bind: Bind
) -> tuple[RankPlan, ...]:
    """Return a host's ranks with device, cores, mask and threads. Their numbers are local."""
    seen = visible(report.kind, report.devices, environment)
    slots = _slots(host, len(seen.entries), nproc)
    entries = [seen.entries[slot] for slot in slots] if seen.entries else []
    chosen_nodes = [seen.nodes[slot] for slot in slots] if seen.entries else []
    cores = _cores(host, report, chosen_nodes, len(slots), bind)
    shared = _host_variables(host, seen, entries)
    ranks: list[RankPlan] = []
    for local_rank in range(len(slots)):
        # With a quota, a rank may be bound to more cores than it may keep busy, so threads follow the quota.
        bound = bind == "cores" and report.core_limit is None and cores[local_rank]
        threads = len(cores[local_rank]) if bound else report.num_cores // len(slots)
        unset = {"OMP_NUM_THREADS": str(max(1, threads))} | _UNSET_DEFAULTS
        if report.kind == "cuda" and entries and _OLD_ALLOCATOR not in environment:
            unset[_ALLOCATOR] = _SEGMENTS
        own = {name: value for name, value in unset.items() if name not in environment}
        device = entries[local_rank] if entries else None
        # The mask comes last: it replaces a mask that the user gave, from which the slots were chosen.
        ranks.append(RankPlan(local_rank, local_rank, device, cores[local_rank], own | shared))
    return tuple(ranks)


def _slots(host: Host, num_devices: int, nproc: int | None) -> list[int]:
    """Return the slots that get a rank, in order: device indexes if the host has devices."""
    if host.slots is not None:
        slots = [slot for slot in host.slots if slot not in host.excluded]
    elif num_devices:
        slots = [slot for slot in range(num_devices) if slot not in host.excluded]
    else:
        # Without slots and devices, --nproc itself says how many ranks the host has.
        slots = [slot for slot in range(nproc or 1) if slot not in host.excluded]
    if not slots:
        raise LaunchError(
            f"{host.name}: --exclude leaves none of {num_devices or 1} slots: exclude the whole host instead"
        )
    if nproc is not None and nproc > len(slots):
        what = "slots" if host.slots is not None or not num_devices else "usable accelerators"
        raise LaunchError(
            f"{host.name}: --nproc {nproc} is more than the host's {len(slots)} {what}. Lower --nproc, raise the "
            "slots, or use no accelerators with --env CUDA_VISIBLE_DEVICES="
        )
    beyond = [slot for slot in slots if slot >= num_devices]
    if num_devices and beyond:
        raise LaunchError(
            f"{host.name}: slot {beyond[0]} needs {beyond[0] + 1} accelerators, found {num_devices} usable. Lower the "
            "slots, change the mask, or use none with --env CUDA_VISIBLE_DEVICES="
        )
    return slots if nproc is None else slots[:nproc]


def _host_variables(host: Host, seen: Visible, entries: Sequence[str]) -> dict[str, str]:
    """Return the mask for all ranks of a host. See [Note: devices]."""
    chosen = host.slots is not None or host.excluded
    return {seen.variable: ",".join(entries)} if entries and chosen else {}


def _cores(
    host: Host, report: HostReport, device_nodes: Sequence[int | None], count: int, bind: Bind
) -> list[tuple[int, ...]]:
    """Return the cores that each rank is bound to."""
    if bind == "auto":
        told = any(node is not None for node in device_nodes)
        # Without devices no node is nearer to a rank than another, so binding would only take cores away.
        bind = "numa" if told and len(report.nodes) > 1 else "none"
    if bind == "none":
        return [()] * count
    if bind == "numa" and not report.nodes:
        raise LaunchError(
            f"{host.name}: --bind numa needs NUMA nodes, but the host reports none: use --bind cores or none"
        )
    nodes = rank_nodes(count, device_nodes, report.nodes)
    if bind == "cores":
        return own_cores(report.cores, nodes, report.nodes)
    return [() if node is None else tuple(report.nodes[node]) for node in nodes]


def _numbered(plan: JobPlan) -> tuple[HostPlan, ...]:
    """Return the hosts with ranks numbered over all hosts, and the variables with these numbers."""
    hosts: list[HostPlan] = []
    first = 0
    for host in plan.hosts:
        ranks: list[RankPlan] = []
        for local in host.ranks:
            rank = first + local.local_rank
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local.local_rank),
                "WORLD_SIZE": str(plan.world_size),
                "LOCAL_WORLD_SIZE": str(len(host.ranks)),
                "GROUP_RANK": str(host.index),
                "GROUP_WORLD_SIZE": str(len(plan.hosts)),
                "MASTER_ADDR": plan.master_address,
            }
            ranks.append(replace(local, rank=rank, environment={**local.environment, **variables}))
        hosts.append(replace(host, ranks=tuple(ranks)))
        first += len(host.ranks)
    return tuple(hosts)


def _rows(plan: JobPlan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("host", "ranks", "local", "device", "cores")]
    for host in plan.hosts:
        groups = [host.ranks] if plan.world_size > MAX_SHOWN_RANKS else [(rank,) for rank in host.ranks]
        for ranks in groups:
            cores = {processor for rank in ranks for processor in rank.cores}
            rows.append(
                (
                    host.name,
                    rank_range(rank.rank for rank in ranks),
                    rank_range(rank.local_rank for rank in ranks),
                    ",".join(rank.device for rank in ranks if rank.device is not None) or "-",
                    rank_range(cores) if cores else "any",
                )
            )
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown_command(command: Sequence[str]) -> str:
    """Return the command for a shell, without the values of secrets: `--hf-token VALUE` and `--hf-token=VALUE`."""
    shown: list[str] = []
    for word in command:
        option, equals, value = word.partition("=")
        # The word after `--hf-token` is its value.
        if shown and shown[-1].startswith("--") and "=" not in shown[-1] and is_secret(shown[-1]):
            shown.append(shown_value(shown[-1], word))
        elif equals and option.startswith("-"):
            shown.append(f"{option}={shown_value(option, value)}")
        else:
            shown.append(shown_value("", word))
    return shlex.join(shown)


def _quoted(value: str) -> str:
    """Quote `value` for a shell, in a line and without bytes that would change the terminal."""
    if value.isprintable():
        return shlex.quote(value)
    escaped = value.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return f"$'{escaped}'"


def _own_variables(plan: JobPlan) -> list[tuple[str, dict[str, str]]]:
    """Return the variables of single ranks, without the numbers that all have, grouped by equal values."""
    groups: list[tuple[list[int], dict[str, str]]] = []
    for rank in (rank for host in plan.hosts for rank in host.ranks):
        own = {name: value for name, value in rank.environment.items() if name not in _NUMBERS}
        for ranks, variables in groups:
            if variables == own:
                ranks.append(rank.rank)
                break
        else:
            groups.append(([rank.rank], own))
    return [(f"rank{'s' * (len(ranks) > 1)} {rank_range(ranks)}", variables) for ranks, variables in groups]
