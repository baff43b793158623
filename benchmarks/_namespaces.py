"""Two hosts on one machine with a cable between them whose speed can be set: network namespaces, joined by a veth pair.

Each host has its own network, host name and /dev/shm, so that ranks on both are ranks of two hosts. A token bucket at
each end of the cable (tc tbf) limits what is sent. Nothing of it outlives the process that made it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
PROGRAMS["setpriv"] = "util-linux"
START_SECONDS = 10.0
CABLE = "cable"
_HOST = "hostname {name} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo made && read -r line"


def fault() -> str | None:
    """Why hosts cannot be made on this machine, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        packages = sorted({PROGRAMS[name] for name in missing})
        return f"{', '.join(missing)} not found; Debian has them in {' '.join(packages)}"
    if os.getuid() != 0:
        return "network namespaces need root"
    trial = "mount -t tmpfs tmpfs /dev/shm && ip link add one type veth peer name two && "
    trial += "tc qdisc add dev one root tbf rate 1gbit burst 256kb latency 50ms"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", trial], capture_output=True, text=True, env=_environment()
    )
    return f"namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else None


def set_speed(bits_per_second: float) -> None:
    """Of what the host sends on which this is called."""
    burst = max(256 << 10, int(bits_per_second / 8 / 1000))  # of a millisecond, and more than a packet that waits
    rate = ["rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "latency", "100ms"]
    command = ["tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *rate]
    subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())


def sent_bytes() -> int:
    """That the kernel has counted on this host's end of the cable, with the headers of packets."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == CABLE:
            return int(counters.split()[8])
    raise RuntimeError(f"this host has no {CABLE}")


class Hosts:
    """Two hosts, while the context lasts."""

    addresses = ("10.78.0.1", "10.78.0.2")

    def __enter__(self) -> Hosts:
        self._hosts = [self._start(f"host{number}") for number in range(2)]
        try:
            second = str(self._hosts[1].pid)
            self._run(0, "ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second)
            for number, address in enumerate(self.addresses):
                self._run(number, "ip", "address", "add", f"{address}/24", "dev", CABLE)
                self._run(number, "ip", "link", "set", CABLE, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            host.kill()
            host.wait()
            for stream in (host.stdin, host.stdout):
                if stream is not None:
                    stream.close()

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """That runs a command on a host, and ends it with this process."""
        with_this = ["setpriv", "--pdeathsig", "KILL", "--"]
        return [*with_this, "nsenter", "--target", str(self._hosts[number].pid), "--net", "--uts", "--mount", *command]

    def _run(self, number: int, *command: str) -> None:
        done = subprocess.run(self.command(number, command), capture_output=True, text=True, env=_environment())
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def _start(self, name: str) -> subprocess.Popen[str]:
        command = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "--uts", "--mount", "sh", "-c"]
        host = subprocess.Popen(
            [*command, _HOST.format(name=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        assert host.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        if host.stdout.readline() != "made\n" or time.monotonic() > deadline:
            host.kill()
            raise RuntimeError(f"{name} was not made: {fault()}")
        return host


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": PATH}
