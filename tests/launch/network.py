"""Several hosts on one machine, for tests: each with a network of its own, a real OpenSSH server, and a power switch.

A host is a set of namespaces (network, host name, mounts, processes) whose first process is sshd:

    login 10.77.0.1     n1 10.77.0.2      n2 10.77.0.3        eth0 in each, one end of a veth pair
         |                   |                 |
    =====+===================+=================+=====         a bridge in a network namespace of its own, the switch

The disk is the machine's own, so that every host has the checkout and its Python. Private to each are /dev/shm, /run,
/proc, /etc/hosts and the user's home with its keys. Three habits of real hosts are kept, because they break programs
that were tried on one machine alone:

- /etc/hosts gives a host's own name as 127.0.1.1 (Debian), and the other names as what they are;
- docker0 has the same address on every host;
- the shell's start-up file prints a greeting, also when ssh runs a command.

Nothing of this outlives the process that made it, however that ends: the kernel ends the namespaces' first processes
with it (PR_SET_PDEATHSIG), with them all others, and with them the networks and the mounts. What a killed run leaves is
a folder, which the next one removes.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.launch.switch import Switch, find_program, run
from tests.launch.virtual_host import VirtualHost

REQUIRED = "LOWTIDE_REQUIRE_NETWORK_TESTS"  # "1": tests fail where they would be skipped
PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
PACKAGES |= {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "mount"}
GREETING = "welcome to {name}: today is a good day"
FOLDER_PREFIX = "lowtide-network-"

SSHD_CONFIG = """Port 22
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
LogLevel VERBOSE
"""


@functools.cache
def network_fault() -> str | None:
    """Why hosts cannot be made on this machine, or None."""
    missing = [name for name in PACKAGES if find_program(name) is None]
    if missing:
        packages = sorted({PACKAGES[name] for name in missing})
        return f"{', '.join(missing)} not found; Debian has them in {' '.join(packages)}"
    if os.getuid() != 0:
        return "network namespaces with an sshd in each need root"
    trial = (
        "mount -t tmpfs tmpfs /run && ip link add docker0 type bridge && ip link add one type veth peer name two && "
        "ip link set one master docker0"
    )
    try:
        done = run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", trial])
    except subprocess.TimeoutExpired as error:
        return f"namespaces are not usable here: {error}"
    return f"namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else None


def require_network() -> None:
    """Skips the test that calls it where hosts cannot be made; fails it if LOWTIDE_REQUIRE_NETWORK_TESTS is 1."""
    if fault := network_fault():
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {fault}")
        pytest.skip(fault)


class Network:
    """The hosts and the switch between them. `network["n1"]` is a host; made ones are started at once."""

    def __init__(self, names: Sequence[str]) -> None:
        remove_dead_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._lock = _locked(self.folder / "lock")
        self._switch = Switch(self.folder)
        self.hosts = {
            name: VirtualHost(self._switch, self.folder / name, name, number)
            for number, name in enumerate(names, start=1)
        }
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> VirtualHost:
        return self.hosts[name]

    def repair(self) -> dict[str, list[psutil.Process]]:
        """Makes all hosts run and reach each other again, without their processes; which these were, by host."""
        left = {name: found for name, host in self.hosts.items() if host.is_on and (found := host.wait_until_idle())}
        for name, host in self.hosts.items():
            if name in left:
                host.kill()
            if not host.is_on:
                host.start()
            host.restore()
            host.release_commands()
        return left

    def close(self) -> None:
        """Ends all hosts and the switch, and removes their files."""
        for host in self.hosts.values():
            if host.is_on:
                host.kill()
        self._switch.close()
        self._lock.close()
        shutil.rmtree(self.folder)

    def _start(self) -> None:
        key = self._make_key(self.folder / "client_key")
        for host in self.hosts.values():
            host.folder.mkdir()
        known = "".join(
            f"{host.name},{host.address} {self._make_key(host.folder / 'host_key')}\n" for host in self.hosts.values()
        )
        for host in self.hosts.values():
            self._write_files(host, key, known)
        for host in self.hosts.values():
            host.start()

    def _make_key(self, path: Path) -> str:
        """Makes a key pair without passphrase; its public half, as authorized_keys and known_hosts have it."""
        done = run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)])
        if done.returncode:
            raise RuntimeError(f"ssh-keygen: {done.stderr.strip()}")
        return path.with_suffix(".pub").read_text(encoding="utf-8").strip()

    def _write_files(self, host: VirtualHost, key: str, known: str) -> None:
        ssh = host.home / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        shutil.copy(self.folder / "client_key", ssh / "id_ed25519")
        (ssh / "authorized_keys").write_text(key + "\n", encoding="utf-8")
        (ssh / "known_hosts").write_text(known, encoding="utf-8")
        cache = Path.home() / ".cache"  # compiled kernels and the like: hosts have it in common, as on a network disk
        cache.mkdir(exist_ok=True)
        (host.home / ".cache").symlink_to(cache)
        (host.home / ".bashrc").write_text(f"echo '{GREETING.format(name=host.name)}'\n", encoding="utf-8")
        (host.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=host.folder), encoding="utf-8")
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}"]
        lines += [f"{other.address} {other.name}" for other in self.hosts.values() if other is not host]
        (host.folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (host.folder / "passwd").write_text(
            f"root:x:0:0:root:{host.home}:/bin/bash\nsshd:x:102:65534::/run/sshd:/usr/sbin/nologin\n", encoding="utf-8"
        )
        (host.folder / "shadow").write_text("root:*:20000::::::\n", encoding="utf-8")


def remove_dead_folders() -> None:
    """Removes the folders of networks whose process is gone: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process is quicker, or holds the lock
            _locked(folder / "lock", "r").close()
            shutil.rmtree(folder, ignore_errors=True)


def _locked(path: Path, mode: str = "a") -> IO[str]:
    file = path.open(mode, encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
