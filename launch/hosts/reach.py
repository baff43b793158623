"""The port of rank 0's store, held before there is a rank 0, and the addresses at which hosts reach each other."""

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
_BACKLOG = 1024  # every host of the job connects at the same time
_PATIENCE_SECONDS = 0.5
_KEPT = 64  # connections that were answered and are still open
_TRY_SECONDS = 3.0


class UnreachableError(Exception):
    """Nobody holds the port for this job, or this host does not get there; the text says why, without the address."""


class HeldPort:
    """A port of this host that is taken until `release`: for rank 0's store, and for the others to try to reach.

    Whoever connects gets BANNER, by which it is known from other programs. Uses a thread.
    """

    def __init__(self, port: int | None = None, is_local: bool = False) -> None:
        """port: None finds a free one. is_local: for this host alone, at its loopback address.

        Raises LaunchError where it is taken, with the process that has it.
        """
        try:
            self._socket = _listen(port or 0, is_local)
        except OSError as error:
            raise LaunchError(_why(port, error)) from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="lowtide held port", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Frees the port; a store may listen there at once. To be called any number of times."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        self._socket.close()
        self._thread.join(2 * _PATIENCE_SECONDS)

    def _answer(self) -> None:
        """Who closes first keeps the connection for a minute (TIME_WAIT): the other end has some time to be it."""
        answered: deque[tuple[float, socket.socket]] = deque()  # one that stays does not hold up the next one
        while True:
            try:
                self._socket.settimeout(_PATIENCE_SECONDS if answered else None)
                link, _ = self._socket.accept()
            except TimeoutError:
                pass
            except OSError:
                break
            else:
                link.setblocking(False)
                with contextlib.suppress(OSError):
                    link.send(BANNER)
                answered.append((time.monotonic(), link))
            while answered and (len(answered) > _KEPT or time.monotonic() - answered[0][0] > _PATIENCE_SECONDS):
                answered.popleft()[1].close()
        for _, link in answered:
            link.close()


def seconds_to_reach(address: str, port: int, limit_seconds: float) -> float:
    """How long the `HeldPort` at address:port took to answer this host. Raises UnreachableError."""
    start = time.monotonic()
    answer = b""
    try:
        with socket.create_connection((address, port), limit_seconds) as link:
            while len(answer) < len(BANNER) and (part := link.recv(len(BANNER) - len(answer))):
                answer += part
                link.settimeout(max(0.001, start + limit_seconds - time.monotonic()))  # of all of it together
    except TimeoutError as error:
        raise UnreachableError(f"no answer within {limit_seconds:g} s") from error
    except OSError as error:
        raise UnreachableError(error.strerror or str(error)) from error
    if answer != BANNER:
        raise UnreachableError("another program's answer")
    return time.monotonic() - start


def _listen(port: int, is_local: bool) -> socket.socket:
    """Where the store will: on all addresses, as torch does it, or on that of comm/rendezvous.py."""
    if is_local:
        return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def _why(port: int | None, error: OSError) -> str:
    if port is None:
        return f"expected a free port for the ranks' store, found none: {error.strerror}; wait until sockets are free"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port}: expected it free for the ranks' store, found it taken by {_owner(port)}; name another "
            "with --master-port, or leave it out and a free one is found"
        )
    advice = "ports below 1024 are for root; " if error.errno == errno.EACCES else ""
    return (
        f"port {port}: expected it free for the ranks' store, found: {error.strerror}; {advice}name another with "
        "--master-port, or leave it out and a free one is found"
    )


def _owner(port: int) -> str:
    """The process that listens there, as far as this user may know it."""
    import psutil  # here, for the error alone: it would take a tenth of a launcher's start

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid is not None:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"


def own_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Of the interfaces that are up, without loopback and link-local ones, IPv4 before IPv6.

    The first is the one at which ssh has reached this host, where it has: others are likely to reach it there too.
    """
    import psutil  # here and below, because no job of one host needs it and it takes a tenth of its start

    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            with contextlib.suppress(ValueError):
                if name in up and address.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(ipaddress.ip_address(address.address.partition("%")[0]))
    usable = sorted((a for a in found if not a.is_loopback and not a.is_link_local), key=lambda a: a.version)
    by_ssh = environ.get("SSH_CONNECTION", "").split()
    return tuple(dict.fromkeys([*by_ssh[2:3], *map(str, usable)]))


def reachable(addresses: Sequence[str], port: int) -> dict[str, str]:
    """Those at which this job's HeldPort answers, each with the interface that leads there ("": not known)."""
    found: dict[str, str] = {}

    def reach(address: str) -> None:
        with contextlib.suppress(UnreachableError):
            seconds_to_reach(address, port, _TRY_SECONDS)
            found[address] = _interface_towards(address, port)

    threads = [threading.Thread(target=reach, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {address: found[address] for address in addresses if address in found}


def _interface_towards(address: str, port: int) -> str:
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return ""
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback:  # to itself, by a name that leads nobody else here
        return ""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(other.address.partition("%")[0] == own for other in addresses):
            return name
    return ""
