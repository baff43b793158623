"""Hold the port of rank 0's store before rank 0 starts, and find the addresses at which hosts reach each other."""

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from .host import LaunchError

BANNER = b"lowtide holds this port\n"
_BACKLOG = 1024  # all hosts connect at the same time
_PATIENCE_SECONDS = 0.5
_KEPT = 64  # answered connections kept open
_TRY_SECONDS = 3.0


class UnreachableError(Exception):
    """No HeldPort of this job answers, or this host cannot reach it. The text says why, without the address."""


class HeldPort:
    """Holds a port of this host until `release`, for rank 0's store; all hosts try to reach it.

    Every connection gets BANNER, to tell it from foreign programs. Uses a thread.
    """

    def __init__(self, port: int | None = None, is_local: bool = False) -> None:
        """port: None finds a free port. is_local: only at this host's loopback address.

        Raises LaunchError if the port is taken, with the process that has it.
        """
        try:
            self._socket = _listen(port or 0, is_local)
        except OSError as error:
            raise LaunchError(_why(port, error)) from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="lowtide held port", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Free the port. A store may listen at it at once. May be called again."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        self._socket.close()
        # The agent forks the ranks next, and needs a single thread for it.
        self._thread.join(2 * _PATIENCE_SECONDS)

    def _answer(self) -> None:
        """Answer connections. The side that closes first keeps TIME_WAIT for a minute: give the peer time."""
        answered: deque[tuple[float, socket.socket]] = deque()  # so an open connection does not delay the next
        while True:
            try:
                self._socket.settimeout(_PATIENCE_SECONDS if answered else None)
                link, _ = self._socket.accept()
            except TimeoutError:
                pass
            except OSError:
                break
            else:
                # A peer that reads nothing must not hold this thread.
                link.setblocking(False)
                with contextlib.suppress(OSError):
                    link.send(BANNER)
                answered.append((time.monotonic(), link))
            while answered and (len(answered) > _KEPT or time.monotonic() - answered[0][0] > _PATIENCE_SECONDS):
                answered.popleft()[1].close()
        for _, link in answered:
            link.close()


def seconds_to_reach(address: str, port: int, limit_seconds: float) -> float:
    """Return how long the `HeldPort` at address:port took to answer. Raises UnreachableError."""
    start = time.monotonic()
    answer = b""
    try:
        with socket.create_connection((address, port), limit_seconds) as link:
            while len(answer) < len(BANNER) and (part := link.recv(len(BANNER) - len(answer))):
                answer += part
                link.settimeout(max(0.001, start + limit_seconds - time.monotonic()))  # a limit for all parts
    except TimeoutError as error:
        raise UnreachableError(f"no answer within {limit_seconds:g} s") from error
    except OSError as error:
        raise UnreachableError(error.strerror or str(error)) from error
    if answer != BANNER:
        raise UnreachableError("another program's answer")
    return time.monotonic() - start


def _listen(port: int, is_local: bool) -> socket.socket:
    """Listen as the store will: on all addresses, as torch does, or at the address of comm/rendezvous.py."""
    if is_local:
        return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    # torch's store uses IPv6 if the host has it: a port that is free for IPv4 alone could still be taken.
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def _why(port: int | None, error: OSError) -> str:
    if port is None:
        return f"expected a free port for the ranks' store, found none: {error.strerror}. Wait until sockets are free"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} for the ranks' store is taken by {_owner(port)}. Choose another with --master-port, or leave "
            "it out to find a free port"
        )
    advice = "Ports below 1024 are for root. " if error.errno == errno.EACCES else ""
    return (
        f"port {port} for the ranks' store cannot be used: {error.strerror}. {advice}Choose another with "
        "--master-port, or leave it out to find a free port"
    )


def _owner(port: int) -> str:
    """Return the process that listens at the port, as far as this user may know."""
    import psutil  # late: it takes a tenth of a launcher's start

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid is not None:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"


def own_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of interfaces that are up, IPv4 first, without loopback and link-local addresses.

    If ssh started this process, its address comes first: more hosts are likely to reach it.
    """
    import psutil  # late: it takes a tenth of a launcher's start, and jobs on a single host do not need it

    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            with contextlib.suppress(ValueError):
                if name in up and address.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(ipaddress.ip_address(address.address.partition("%")[0]))
    usable = sorted((a for a in found if not a.is_loopback and not a.is_link_local), key=lambda a: a.version)
    by_ssh = environ.get("SSH_CONNECTION", "").split()
    # SSH_CONNECTION is "client port server port": the third word is this host's address as the client used it.
    return tuple(dict.fromkeys([*by_ssh[2:3], *map(str, usable)]))


def reachable(addresses: Sequence[str], port: int) -> dict[str, str]:
    """Return the addresses at which this job's HeldPort answers -> this host's interface towards it, "" if unknown."""
    found: dict[str, str] = {}

    def reach(address: str) -> None:
        with contextlib.suppress(UnreachableError):
            seconds_to_reach(address, port, _TRY_SECONDS)
            found[address] = _interface_towards(address, port)

    threads = [threading.Thread(target=reach, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        # All at once: each silent address costs _TRY_SECONDS, and a host may have many.
        thread.start()
    for thread in threads:
        thread.join()
    return {address: found[address] for address in addresses if address in found}


def _interface_towards(address: str, port: int) -> str:
    try:
        # UDP: `connect` only asks the kernel for a route, and the socket's name tells its interface.
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return ""
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback:  # itself; no host but this can use that interface
        return ""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(other.address.partition("%")[0] == own for other in addresses):
            return name
    return ""
