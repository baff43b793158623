"""At which addresses this host can be reached, and which addresses of another it reaches."""

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Mapping, Sequence

from .held_port import UnreachableError, seconds_to_reach

_TRY_SECONDS = 3.0


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
