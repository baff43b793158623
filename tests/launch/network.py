"""Several hosts on one machine, for tests: each with a network of its own, a real OpenSSH server, and a power switch.

A host is a set of namespaces (network, host name, mounts, processes) whose first process is sshd:

    login 10.77.0.1     n1 10.77.0.2      n2 10.77.0.3        eth0 in each, one end of a veth pair
         |                   |                 |
    =====+===================+=================+=====         a bridge in a network namespace of its own, the switch

The disk is the machine's own, so that every host has the checkout and its Python. Private to each are /dev/shm, /run,
/proc, /etc/hosts and the user's home with its keys. Three habits of real hosts are kept, because they break programs
that were tried on one machine alone: /etc/hosts gives a host's own name as 127.0.1.1 (Debian), docker0 has the same
address on every host, and the shell's start-up file prints a greeting, also when ssh runs a command.

Nothing of this outlives the process that made it, however that ends: the kernel ends the namespaces' first processes
with it (PR_SET_PDEATHSIG), with them all others, and with them the networks and the mounts.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

REQUIRED = "LOWTIDE_REQUIRE_NETWORK_TESTS"  # "1": tests fail where they would be skipped
PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
PACKAGES |= {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "mount"}
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_SECONDS = 20.0
GONE_SECONDS = 10.0  # until the kernel has removed all processes of a killed host

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
HOST_SCRIPT = """set -e
cd "$1"
hostname "$2"
mount -t tmpfs -o size=1m,mode=755 tmpfs /run
mkdir /run/sshd
mount -t tmpfs -o size=512m tmpfs /dev/shm
for file in passwd shadow hosts; do mount --bind "$file" "/etc/$file"; done
ip link set lo up
ip link add docker0 type bridge
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up
echo made
read -r go
ip link set eth0 address "$4" up
ip address add "$3/24" dev eth0
exec "$5" -D -f sshd_config -E sshd.log </dev/null >/dev/null 2>&1
"""


def run(*command: str, checks: bool = True) -> "subprocess.CompletedProcess[str]":
    """Runs a system program to its end, and keeps what it says. checks: raises RuntimeError if it fails."""
    environment = os.environ | {"PATH": SYSTEM_PATH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, env=environment)
    if checks and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done


def find_program(name: str) -> str | None:
    """Its path, also where only the system's administrator would look."""
    return shutil.which(name, path=SYSTEM_PATH)


def wait_until(condition: Callable[[], bool], fault: Callable[[], str | None], otherwise: Callable[[], str]) -> None:
    """Returns when the condition holds; raises RuntimeError after START_SECONDS, or at a fault."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline or fault() is not None:
            raise RuntimeError(f"{otherwise()} {fault() or ''}")
        time.sleep(0.005)


@functools.cache
def network_fault() -> str | None:
    """Why hosts cannot be made on this machine, or None."""
    if missing := [name for name in PACKAGES if find_program(name) is None]:
        packages = sorted({PACKAGES[name] for name in missing})
        return f"{', '.join(missing)} not found; Debian has them in {' '.join(packages)}"
    if os.getuid() != 0:
        return "network namespaces with an sshd in each need root"
    trial = (
        "mount -t tmpfs tmpfs /run && ip link add docker0 type bridge && ip link add one type veth peer name two && "
        "ip link set one master docker0"
    )
    options = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
    try:
        done = run("unshare", *options, "sh", "-c", trial, checks=False)
    except subprocess.TimeoutExpired as error:
        return f"namespaces are not usable here: {error}"
    return f"namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else None


def require_network() -> None:
    """Skips the test that calls it where hosts cannot be made; fails it if LOWTIDE_REQUIRE_NETWORK_TESTS is 1."""
    if fault := network_fault():
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {fault}")
        pytest.skip(fault)


class Switch:
    """A bridge in a network namespace of its own. folder: takes what the processes that are spawned say."""

    def __init__(self, folder: Path) -> None:
        self._output = (folder / "output").open("w+", encoding="utf-8")
        self._process = self.spawn(["unshare", "--net", "sleep", "infinity"])
        own, place = os.readlink("/proc/self/ns/net"), f"/proc/{self._process.pid}/ns/net"
        wait_until(lambda: os.readlink(place) != own, lambda: None, lambda: f"no network was made: {self.said()}")
        self.run("ip", "link", "add", "switch", "type", "bridge")
        self.run("ip", "link", "set", "switch", "up")

    def run(self, *command: str) -> None:
        """Runs a command in the switch's network."""
        run("nsenter", "--target", str(self._process.pid), "--net", *command)

    def spawn(self, command: Sequence[str], **how: Any) -> "subprocess.Popen[str]":
        """Starts a process that ends with this one."""
        how |= {"env": os.environ | {"PATH": SYSTEM_PATH}, "stderr": self._output}
        command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
        return subprocess.Popen(command, text=True, start_new_session=True, **how)

    def said(self) -> str:
        """What the spawned processes have written to stderr."""
        return Path(self._output.name).read_text(encoding="utf-8")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


class VirtualHost:
    """One host. `name` is also its host name, `address` that of eth0, `folder` holds its files, `home` its user's home.

    A host that was killed comes back with `start`.
    """

    def __init__(self, switch: Switch, folder: Path, name: str, number: int) -> None:
        self.name, self.address, self.folder, self.home = name, f"10.77.0.{number}", folder, folder / "home"
        self._switch = switch
        self._port = f"port{number}"  # the switch's end of the cable
        self._card = f"02:00:00:00:00:{number:02x}"  # stays when the host is started anew, as others remember it
        self._unshare: subprocess.Popen[str] | None = None
        self._init: psutil.Process | None = None
        self._namespace = ""
        self._commands: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Starts the host and returns when its sshd listens."""
        listens = self.folder / "sshd.pid"
        listens.unlink(missing_ok=True)
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = ["sh", "-c", HOST_SCRIPT, "host", str(self.folder), self.name, self.address, self._card]
        command = ["unshare", *namespaces, *script, str(find_program("sshd"))]
        unshare = self._unshare = self._switch.spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert unshare.stdin is not None and unshare.stdout is not None
        if unshare.stdout.readline() != "made\n":
            raise RuntimeError(f"host {self.name} was not made: {self._switch.said()}")
        self._init = psutil.Process(unshare.pid).children()[0]
        self._namespace = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        peer = ["peer", "name", "eth0", "netns", str(self._init.pid)]
        self._switch.run("ip", "link", "add", self._port, "type", "veth", *peer)
        self._switch.run("ip", "link", "set", self._port, "master", "switch", "up")
        unshare.stdin.write("go\n")
        unshare.stdin.close()
        ended = lambda: None if unshare.poll() is None else f"ended with {unshare.poll()}"  # noqa: E731
        wait_until(listens.exists, ended, lambda: f"sshd of {self.name} does not listen: {self._switch.said()}")

    @property
    def is_on(self) -> bool:
        """Whether the host has been started and not been killed."""
        return self._unshare is not None

    def popen(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        **how: Any,
    ) -> "subprocess.Popen[str]":
        """Starts a command on this host, as if its user had typed it at the host's own console.

        environment: on top of the test's own. The process is nsenter's: it passes the exit status on, but no signal;
        `main_process` is the command itself.
        """
        assert self._init is not None
        go_there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder or self.home)]
        namespaces = ["--target", str(self._init.pid), "--mount", "--uts", "--net", "--pid"]
        variables = {**os.environ, "PATH": SYSTEM_PATH, "HOME": str(self.home), **(environment or {})}
        command = ["nsenter", *namespaces, "--", *go_there, *command]
        self._commands.append(subprocess.Popen(command, text=True, env=variables, **how))
        return self._commands[-1]

    def run(self, *command: str) -> str:
        """What a command on this host prints; raises RuntimeError if it fails."""
        process = self.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=START_SECONDS)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} on {self.name} ended with {process.returncode}: {err}{out}")
        return out

    def processes(self) -> list[psutil.Process]:
        """All processes of this host, zombies too, but those of its sshd, which holds on to a login that is cut off."""
        return [process for process in psutil.process_iter() if self._has(process)] if self._init else []

    def cut(self) -> None:
        """Lets every packet from and to this host vanish; nobody is told, and addresses and routes stay."""
        self._switch.run("ip", "link", "set", self._port, "nomaster")

    def restore(self) -> None:
        """Ends a cut."""
        self._switch.run("ip", "link", "set", self._port, "master", "switch")

    def kill(self) -> None:
        """Takes the power away: no process is left, and no other host hears a word of it."""
        assert self._init is not None and self._unshare is not None and self._unshare.stdout is not None
        self.cut()
        processes = self.processes()
        self._init.kill()
        self._unshare.wait(GONE_SECONDS)
        self._unshare.stdout.close()
        _, left = psutil.wait_procs(processes, timeout=GONE_SECONDS)
        self._unshare = self._init = None
        with contextlib.suppress(RuntimeError):  # the kernel takes the cable away with the host, in its own time
            self._switch.run("ip", "link", "delete", self._port)
        if left:
            raise RuntimeError(f"processes of {self.name} outlive it: {left}")

    def repair(self) -> list[psutil.Process]:
        """Makes the host run and be reached again, without what others have left on it; what that was."""
        deadline = time.monotonic() + 5.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.kill()
        if not self.is_on:
            self.start()
        self.restore()
        for process in self._commands:  # that nobody has waited for
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._commands.clear()
        return left

    @contextlib.contextmanager
    def small_disk(self, folder: Path) -> Iterator[None]:
        """Makes `folder` a disk of its own on this host, 64 KiB small; the other hosts see the folder below."""
        folder.mkdir(parents=True, exist_ok=True)
        self.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder))
        try:
            yield
        finally:
            if self.is_on:
                self.run("umount", "--lazy", str(folder))

    @contextlib.contextmanager
    def home_file(self, name: str, text: str) -> Iterator[None]:
        """Gives a file of this host's home, such as ".ssh/authorized_keys", another text."""
        path = self.home / name
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def _has(self, process: psutil.Process) -> bool:
        """Whether a process is in this host's namespace; a zombie may have lost its own, and is where its parent is.

        Who waits for an end asks this of every process of the machine: first comes what is found quickly.
        """
        try:
            try:
                return os.readlink(f"/proc/{process.pid}/ns/pid") == self._namespace and process.name() != "sshd"
            except OSError:
                parent = process.parent() if process.status() == psutil.STATUS_ZOMBIE else None
                return process.name() != "sshd" and parent is not None and self._has(parent)
        except psutil.Error:  # it is gone
            return False


class Network:
    """The hosts, whose files are in `folder`, and the switch. `network["n1"]` is a host; they are started at once."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self._switch = Switch(self.folder)
        self.hosts = {
            name: VirtualHost(self._switch, self.folder / name, name, number)
            for number, name in enumerate(names, start=1)
        }
        try:
            self._write_files()
            for host in self.hosts.values():
                host.start()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> VirtualHost:
        return self.hosts[name]

    def repair(self) -> dict[str, list[psutil.Process]]:
        """Repairs all hosts; which processes were left, by host."""
        return {name: left for name, host in self.hosts.items() if (left := host.repair())}

    def close(self) -> None:
        """Ends all hosts and the switch."""
        for host in self.hosts.values():
            if host.is_on:
                host.kill()
        self._switch.close()

    def _write_files(self) -> None:
        key = _make_key(self.folder / "client_key")
        known = ""
        for host in self.hosts.values():
            (host.home / ".ssh").mkdir(parents=True, mode=0o700)
            known += f"{host.name},{host.address} {_make_key(host.folder / 'host_key')}\n"
        cache = Path.home() / ".cache"  # compiled kernels and the like: hosts have it in common, as on a network disk
        cache.mkdir(exist_ok=True)
        for host in self.hosts.values():
            others = [f"{other.address} {other.name}" for other in self.hosts.values() if other is not host]
            files = {
                "home/.ssh/authorized_keys": key,
                "home/.ssh/known_hosts": known.strip(),
                "home/.bashrc": f"echo 'welcome to {host.name}: today is a good day'",
                "sshd_config": SSHD_CONFIG.format(folder=host.folder),
                "hosts": "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others]),
                "passwd": f"root:x:0:0:root:{host.home}:/bin/bash\nsshd:x:102:65534::/run/sshd:/usr/sbin/nologin",
                "shadow": "root:*:20000::::::",
            }
            for name, text in files.items():
                (host.folder / name).write_text(text + "\n", encoding="utf-8")
            shutil.copy(self.folder / "client_key", host.home / ".ssh/id_ed25519")
            (host.home / ".cache").symlink_to(cache)


def _make_key(path: Path) -> str:
    """Makes a key pair without passphrase; its public half, as authorized_keys and known_hosts have it."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))
    return path.with_suffix(".pub").read_text(encoding="utf-8").strip()


def main_process(process: "subprocess.Popen[str]") -> psutil.Process:
    """The command that `VirtualHost.popen` has started, below nsenter and the shell that becomes it."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            found[:] = psutil.Process(process.pid).children()[:1]
            return found[0].cmdline()[1:3] != ["-c", 'cd "$0" && exec "$@"']
        return False

    ended = lambda: None if process.poll() is None else f"it ended with {process.returncode}"  # noqa: E731
    wait_until(is_there, ended, lambda: f"the command of process {process.pid} did not start")
    return found[0]
