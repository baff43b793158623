"""Find the hosts that a job may use, and this process's part in the job.

The first source with an answer wins:

    1. flags        --transport local; --num-hosts with --host-index and --meet; --hosts; --hostfile
    2. this process a rank of torchrun's kind; a process of mpirun; a task or the script of SLURM; LSF; a pod
    3. nothing      this machine

--nproc, --include, --exclude and --transport then apply to the result. If flags override 2, a note says so.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..hosts.host import Allocation, Host, LaunchError, Rendezvous, TransportName
from ..hosts.names import parse_hosts, read_hostfile, select
from .kubernetes import find_pod
from .managers import find_lsf, find_slurm, node_names
from .mpi import find_mpi, find_torchrun

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class AllocationRequest:
    """The command line's options about hosts.

    nproc: ranks on each host; "auto" and None: all slots. include, exclude: `host1@host2:0,2`. num_hosts, host_index
    and meet ("host:port") describe a job with a launcher started on every host (transport "join").
    """

    hostfile: Path | None = None
    hosts: str | None = None
    nproc: int | Literal["auto"] | None = None
    include: str | None = None
    exclude: str | None = None
    transport: TransportName | None = None
    num_hosts: int | None = None
    host_index: int | None = None
    meet: str | None = None


def find_allocation(
    request: AllocationRequest,
    environ: Mapping[str, str],
    full_name: Callable[[], str] = socket.getfqdn,
) -> Allocation:
    """Return the hosts from the first source with an answer: flags, this process's job, this machine.

    full_name: returns this machine's name. Raises LaunchError for contradictions, unknown hosts and unreadable files.
    """
    _check(request)
    # Named hosts come first, even with --transport local. `_with_transport` then refuses more than a single host.
    if request.transport == "local" and request.hosts is None and request.hostfile is None:
        found = _over_others(_this_machine(), "--transport local", environ)
    elif request.host_index is not None:
        found = _over_others(_by_hand(request), "--host-index", environ)
    elif request.hosts is not None or request.hostfile is not None:
        found = _named(request, environ, full_name)
    else:
        found = _part_of(request, environ, full_name) or _this_machine()
    # Nothing is planned for a rank, so the flags below would have no effect without saying so.
    if found.part == "rank":
        return _as_rank(found, request)
    return _applied(found, request)


def _this_machine() -> Allocation:
    """Return this machine as the only host. Its agent is a child of the launcher."""
    return Allocation("this machine", "local", (Host("localhost"),))


def _check(request: AllocationRequest) -> None:
    if request.hosts is not None and request.hostfile is not None:
        raise LaunchError(f"--hosts {request.hosts} and --hostfile {request.hostfile} both name hosts: remove either")
    for flag, value in (("--nproc", request.nproc), ("--num-hosts", request.num_hosts)):
        if isinstance(value, int) and value < 1:
            raise LaunchError(f"{flag} must be at least 1, found {value}")
    by_hand = {"--num-hosts": request.num_hosts, "--host-index": request.host_index, "--meet": request.meet}
    missing = [flag for flag, value in by_hand.items() if value is None]
    if missing and (request.host_index is not None or request.meet is not None):
        raise LaunchError(
            f"expected --num-hosts, --host-index and --meet HOST:PORT together, found no {' and no '.join(missing)}. "
            "They are for a launcher that you start on every host"
        )
    if not missing and (request.hosts is not None or request.hostfile is not None):
        raise LaunchError("--host-index is for launchers that you start on every host: remove --hosts and --hostfile")


def _part_of(request: AllocationRequest, environ: Mapping[str, str], full_name: Callable[[], str]) -> Allocation | None:
    """Return this process's part in a running job, or None."""
    return (
        # The innermost starter comes first: a rank of torchrun inside a SLURM job or a pod has their variables too.
        find_torchrun(environ)
        or find_mpi(environ)
        or find_slurm(environ)
        or find_lsf(environ)
        or find_pod(environ, request.num_hosts, full_name)
    )


def _over_others(found: Allocation, flag: str, environ: Mapping[str, str]) -> Allocation:
    """Add a note if the environment contradicts the flag that `found` comes from."""
    try:
        # No name is looked up for a mere note: it may take seconds. An indexed Job then raises, and gets no note.
        other = _part_of(AllocationRequest(), environ, lambda: "")
    except LaunchError:
        return found
    if other is None:
        return found
    names = [host.name for host in other.hosts]
    shown = "" if other.part == "rank" else " with " + ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return replace(found, notes=(*found.notes, f"{flag} overrides {other.source}{shown}"))


def _named(request: AllocationRequest, environ: Mapping[str, str], full_name: Callable[[], str]) -> Allocation:
    """Return the hosts that the user named. Inside a SLURM job with all these hosts, srun reaches them."""
    if request.hosts is not None:
        hosts, source, flag = parse_hosts(request.hosts), f"--hosts {request.hosts}", "--hosts"
    else:
        path = request.hostfile or Path()
        hosts, source, flag = read_hostfile(path), f"hostfile {path}", "--hostfile"
    # A name may be `user@localhost`.
    loopback = [host.name for host in hosts if host.name.rpartition("@")[2] in _LOOPBACK]
    # MASTER_ADDR comes from this name, and every host would look for the store on itself.
    if loopback and len(hosts) > 1:
        raise LaunchError(
            f'{source}: remote hosts cannot reach this host by the name "{loopback[0]}". Write its name in the network'
        )
    transport: TransportName = "ssh"
    if len(hosts) == 1 and (loopback or hosts[0].name in _own_names(full_name)):
        transport = "local"
    # srun reaches only nodes of its job. If a single host is foreign, ssh starts all agents.
    elif {host.name for host in hosts} <= set(node_names(environ)):
        transport = "srun"
    return _over_others(Allocation(source, transport, hosts), flag, environ)


def _own_names(full_name: Callable[[], str]) -> set[str]:
    name = full_name()
    return {name, name.partition(".")[0]}


def _by_hand(request: AllocationRequest) -> Allocation:
    """Return the hosts of launchers that the user starts on every host, as with torchrun's --node-rank."""
    meet, index, count = request.meet or "", request.host_index or 0, request.num_hosts or 1
    # From the right: an IPv6 address has colons too.
    address, _, port = meet.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f'--meet: expected HOST:PORT, for example node1:23456, found "{meet}"')
    if not 0 <= index < count:
        raise LaunchError(f"--host-index {index} is not between 0 and {count - 1}, for --num-hosts {count}")
    # Only host 0 is known by name. The names of the rest are for messages.
    hosts = tuple(Host(address if number == 0 else f"host-{number}") for number in range(count))
    source = f"--host-index {index} of --num-hosts {count}, meeting at {meet}"
    if count == 1:
        return Allocation(source, "local", hosts)
    rendezvous = Rendezvous(index, address.strip("[]"), int(port), f"by hand {meet}")
    return Allocation(source, "join", hosts, part="agent" if index else "launcher", rendezvous=rendezvous)


def _as_rank(found: Allocation, request: AllocationRequest) -> Allocation:
    """Check that no flag plans ranks: each rank of the running job would start a job."""
    asked = {"--nproc": request.nproc, "--include": request.include, "--exclude": request.exclude}
    flags = [flag for flag, value in (asked | {"--transport": request.transport}).items() if value is not None]
    if flags:
        raise LaunchError(
            f"{flags[0]} plans ranks, but this process is already a rank: {found.source}. Start lowtide once for each "
            "host (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), leave the flag out to run the script as this "
            "rank, or use --transport local for a separate job on this machine"
        )
    return found


def _applied(found: Allocation, request: AllocationRequest) -> Allocation:
    """Apply --transport, --include, --exclude and --nproc."""
    if request.transport not in (None, found.transport):
        found = _with_transport(found, request.transport)
    if request.include is not None or request.exclude is not None:
        if found.transport == "join":
            raise LaunchError(
                f"--include and --exclude cannot leave out hosts that run lowtide already: {found.source}. Start it "
                "on fewer hosts"
            )
        found = replace(found, hosts=select(found.hosts, request.include, request.exclude))
    # Last, because --include and --exclude change the number.
    if request.num_hosts is not None and request.num_hosts != len(found.hosts):
        raise LaunchError(
            f"--num-hosts {request.num_hosts} != number of hosts ({len(found.hosts)}) of {found.source}: remove it, "
            "name the hosts with --hosts, or start the command on each host with --host-index and --meet too"
        )
    if isinstance(request.nproc, int):
        found = replace(found, nproc=request.nproc)
    return found


def _with_transport(found: Allocation, transport: TransportName | None) -> Allocation:
    assert transport is not None
    names = ", ".join(host.name for host in found.hosts[:4])
    if found.transport == "join":
        raise LaunchError(
            f"--transport {transport} starts agents from a single launcher, but launchers run on every host: "
            f"{found.source}. Start lowtide once"
        )
    if transport == "join":
        raise LaunchError(
            "--transport join is for launchers that are started on every host: expected a pod, a task of srun or "
            f"mpirun, or --host-index with --num-hosts and --meet, found {found.source}"
        )
    if transport == "local" and len(found.hosts) > 1:
        raise LaunchError(f"--transport local is for a single host, found {len(found.hosts)} ({names}): leave it out")
    # No source named hosts. Only ssh, srun and mpirun come here, and they need hosts to reach.
    if found.source == _this_machine().source:
        raise LaunchError(f"--transport {transport} needs hosts, found none. Name them with --hosts or --hostfile")
    return replace(found, transport=transport)
