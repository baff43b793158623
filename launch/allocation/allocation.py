"""Finds the hosts that a job may use, and which part of the job this process is.

The first of these that says something wins:

    1. flags        --transport local; --num-hosts with --host-index and --meet; --hosts; --hostfile
    2. this process a rank of torchrun's kind; a process of mpirun; a task or the script of SLURM; LSF; a pod
    3. nothing      this machine

--nproc, --include, --exclude and --transport then apply to what was found. Where flags win over 2, a note says so.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..hosts.host import AgentTransport, Allocation, Host, LaunchError, Rendezvous
from ..hosts.names import parse_hosts, read_hostfile, select
from .kubernetes import find_pod
from .managers import find_lsf, find_slurm, node_names
from .mpi import find_mpi, find_torchrun

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class AllocationRequest:
    """What the command line says about hosts.

    nproc: ranks on each host; "auto" and None: all slots. include, exclude: `host1@host2:0,2`. num_hosts, host_index
    and meet ("host:port") describe a job whose launchers someone else starts, one on each host (transport "join").
    """

    hostfile: Path | None = None
    hosts: str | None = None
    nproc: int | Literal["auto"] | None = None
    include: str | None = None
    exclude: str | None = None
    transport: AgentTransport | None = None
    num_hosts: int | None = None
    host_index: int | None = None
    meet: str | None = None


def find_allocation(
    request: AllocationRequest,
    environ: Mapping[str, str],
    full_name: Callable[[], str] = socket.getfqdn,
) -> Allocation:
    """The hosts, from the first of these that says something: flags, what this process is part of, this machine.

    full_name: this machine's name. Raises LaunchError for contradictions, unknown hosts, and files that cannot be read.
    """
    _check(request)
    if request.transport == "local" and request.hosts is None and request.hostfile is None:
        found = _over_others(_this_machine(), "--transport local", environ)
    elif request.host_index is not None:
        found = _over_others(_by_hand(request), "--host-index", environ)
    elif request.hosts is not None or request.hostfile is not None:
        found = _named(request, environ, full_name)
    else:
        found = _part_of(request, environ, full_name) or _this_machine()
    if found.part == "rank":
        return _as_rank(found, request)
    return _applied(found, request)


def _this_machine() -> Allocation:
    """One host, whose agent is a child of the launcher."""
    return Allocation("this machine", "local", (Host("localhost"),))


def _check(request: AllocationRequest) -> None:
    if request.hosts is not None and request.hostfile is not None:
        raise LaunchError(f"--hosts {request.hosts} and --hostfile {request.hostfile} both name hosts; keep one")
    for flag, value in (("--nproc", request.nproc), ("--num-hosts", request.num_hosts)):
        if isinstance(value, int) and value < 1:
            raise LaunchError(f"{flag} must be at least 1, found {value}")
    by_hand = {"--num-hosts": request.num_hosts, "--host-index": request.host_index, "--meet": request.meet}
    missing = [flag for flag, value in by_hand.items() if value is None]
    if missing and (request.host_index is not None or request.meet is not None):
        raise LaunchError(
            f"--host-index needs --num-hosts and --meet HOST:PORT with it, found no {' and no '.join(missing)}; they "
            "are for a launcher that you start on every host"
        )
    if not missing and (request.hosts is not None or request.hostfile is not None):
        raise LaunchError(
            "--host-index is for launchers that you start on every host; leave --hosts and --hostfile out"
        )


def _part_of(request: AllocationRequest, environ: Mapping[str, str], full_name: Callable[[], str]) -> Allocation | None:
    """What this process was started as, or None where nobody says so."""
    return (
        find_torchrun(environ)
        or find_mpi(environ)
        or find_slurm(environ)
        or find_lsf(environ)
        or find_pod(environ, request.num_hosts, full_name)
    )


def _over_others(found: Allocation, flag: str, environ: Mapping[str, str]) -> Allocation:
    """`found` with a note where the environment says something else than the flag that it came from."""
    try:
        other = _part_of(AllocationRequest(), environ, lambda: "")
    except LaunchError:
        return found
    if other is None:
        return found
    names = [host.name for host in other.hosts]
    shown = "" if other.part == "rank" else " with " + ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return replace(found, notes=(*found.notes, f"{flag} wins over {other.source}{shown}"))


def _named(request: AllocationRequest, environ: Mapping[str, str], full_name: Callable[[], str]) -> Allocation:
    """Hosts that the user has named; inside of a SLURM job that has them all, they are reached by srun."""
    if request.hosts is not None:
        hosts, source, flag = parse_hosts(request.hosts), f"--hosts {request.hosts}", "--hosts"
    else:
        path = request.hostfile or Path()
        hosts, source, flag = read_hostfile(path), f"hostfile {path}", "--hostfile"
    loopback = [host.name for host in hosts if host.name.rpartition("@")[2] in _LOOPBACK]
    if loopback and len(hosts) > 1:
        raise LaunchError(
            f'{source}: "{loopback[0]}" stands beside other hosts, which cannot reach it by that name; write the name '
            "that they know it by"
        )
    transport: AgentTransport = "ssh"
    if len(hosts) == 1 and (loopback or hosts[0].name in _own_names(full_name)):
        transport = "local"
    elif {host.name for host in hosts} <= set(node_names(environ)):
        transport = "srun"
    return _over_others(Allocation(source, transport, hosts), flag, environ)


def _own_names(full_name: Callable[[], str]) -> set[str]:
    name = full_name()
    return {name, name.partition(".")[0]}


def _by_hand(request: AllocationRequest) -> Allocation:
    """A launcher that the user starts on every host, as with torchrun's --node-rank."""
    meet, index, count = request.meet or "", request.host_index or 0, request.num_hosts or 1
    address, _, port = meet.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f'--meet: expected HOST:PORT, such as node1:23456, found "{meet}"')
    if not 0 <= index < count:
        raise LaunchError(f"--host-index {index} is not between 0 and {count - 1}; --num-hosts is {count}")
    hosts = tuple(Host(address if number == 0 else f"host-{number}") for number in range(count))
    source = f"--host-index {index} of --num-hosts {count}, meeting at {meet}"
    if count == 1:
        return Allocation(source, "local", hosts)
    rendezvous = Rendezvous(index, address.strip("[]"), int(port), f"by hand {meet}")
    return Allocation(source, "join", hosts, part="agent" if index else "launcher", rendezvous=rendezvous)


def _as_rank(found: Allocation, request: AllocationRequest) -> Allocation:
    """A rank plans nothing: flags that say otherwise would start a job in each rank of another."""
    asked = {"--nproc": request.nproc, "--include": request.include, "--exclude": request.exclude}
    flags = [flag for flag, value in (asked | {"--transport": request.transport}).items() if value is not None]
    if flags:
        raise LaunchError(
            f"{flags[0]} plans ranks, but this process is a rank already: {found.source}. Start one lowtide a host "
            "(srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), or leave the flag out to run the script as this "
            "rank, or say --transport local for a job of its own on this machine"
        )
    return found


def _applied(found: Allocation, request: AllocationRequest) -> Allocation:
    """`found` with --transport, --include, --exclude and --nproc."""
    if request.transport not in (None, found.transport):
        found = _with_transport(found, request.transport)
    if request.include is not None or request.exclude is not None:
        if found.transport == "join":
            raise LaunchError(
                f"--include and --exclude cannot leave out hosts on which someone else has started lowtide: "
                f"{found.source}; start it on fewer hosts"
            )
        found = replace(found, hosts=select(found.hosts, request.include, request.exclude))
    if request.num_hosts is not None and request.num_hosts != len(found.hosts):
        raise LaunchError(
            f"--num-hosts {request.num_hosts} is not what {found.source} has: {len(found.hosts)}; drop it"
        )
    if isinstance(request.nproc, int):
        found = replace(found, nproc=request.nproc)
    return found


def _with_transport(found: Allocation, transport: AgentTransport | None) -> Allocation:
    assert transport is not None
    names = ", ".join(host.name for host in found.hosts[:4])
    if found.transport == "join":
        raise LaunchError(
            f"--transport {transport} starts agents from one launcher, but someone else has started one on every host: "
            f"{found.source}; start lowtide once"
        )
    if transport == "join":
        raise LaunchError(
            "--transport join is for launchers that are started on every host: expected a pod, a task of srun or "
            f"mpirun, or --host-index with --num-hosts and --meet, found {found.source}"
        )
    if transport == "local" and len(found.hosts) > 1:
        raise LaunchError(f"--transport local is for one host, found {len(found.hosts)} ({names}); leave it out")
    if found.source == _this_machine().source:
        raise LaunchError(f"--transport {transport} needs hosts, found none; name them with --hosts or --hostfile")
    return replace(found, transport=transport)
