"""One host of `network.py`: a set of namespaces whose first process is sshd."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.launch.switch import START_SECONDS, SYSTEM_PATH, Switch, find_program

GONE_SECONDS = 10.0  # until the kernel has removed all processes of a killed host

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


class VirtualHost:
    """One host. `name` is also its host name, `address` that of eth0, `folder` holds its files, `home` its user's home.

    A host that was killed comes back with `start`.
    """

    def __init__(self, switch: Switch, folder: Path, name: str, number: int) -> None:
        self.name, self.address, self.folder = name, f"10.77.0.{number}", folder
        self._switch = switch
        self.home = self.folder / "home"
        self._port = f"port{number}"  # the switch's end of the cable
        self._card = f"02:00:00:00:00:{number:02x}"  # stays when the host is started anew, as others remember it
        self._unshare: subprocess.Popen[str] | None = None
        self._init: psutil.Process | None = None
        self._namespace = ""
        self._commands: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Starts the host and returns when its sshd listens."""
        (self.folder / "sshd.pid").unlink(missing_ok=True)
        sshd = find_program("sshd")
        assert sshd is not None
        script = ["sh", "-c", HOST_SCRIPT, "host", str(self.folder), self.name, self.address, self._card]
        self._unshare = self._switch.spawn(
            [
                "unshare",
                "--net",
                "--uts",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                *script,
                sshd,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._unshare.stdin is not None and self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "made\n":
            raise RuntimeError(f"host {self.name} was not made: {self._switch.said()}")
        self._init = psutil.Process(self._unshare.pid).children()[0]
        self._namespace = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        peer = ["peer", "name", "eth0", "netns", str(self._init.pid)]
        self._switch.run("ip", "link", "add", self._port, "type", "veth", *peer)
        self._switch.run("ip", "link", "set", self._port, "master", "switch", "up")
        self._unshare.stdin.write("go\n")
        self._unshare.stdin.close()
        deadline = time.monotonic() + START_SECONDS
        while not (self.folder / "sshd.pid").exists():
            if time.monotonic() > deadline or self._unshare.poll() is not None:
                raise RuntimeError(f"sshd of {self.name} does not listen: {self._switch.said()}{self.log()}")
            time.sleep(0.01)

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
        process = subprocess.Popen(
            ["nsenter", *namespaces, "--", *go_there, *command],
            text=True,
            env={**os.environ, "PATH": SYSTEM_PATH, "HOME": str(self.home), **(environment or {})},
            **how,
        )
        self._commands.append(process)
        return process

    def run(self, *command: str, timeout: float = 20) -> str:
        """What a command on this host prints; raises RuntimeError if it fails."""
        process = self.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            main_process(process).kill()
            process.communicate()
            raise
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} on {self.name} ended with {process.returncode}: {err}{out}")
        return out

    def processes(self) -> list[psutil.Process]:
        """All processes of this host, zombies too, but those of its sshd, which holds on to a login that is cut off."""
        if self._init is None:
            return []
        return [process for process in psutil.process_iter() if self._has(process)]

    def wait_until_idle(self, seconds: float = 5.0) -> list[psutil.Process]:
        """The processes that are left after at most `seconds`: none, if all have ended."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def release_commands(self) -> None:
        """Ends what `popen` has started and nobody has waited for, and closes its pipes."""
        for process in self._commands:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._commands.clear()

    def cut(self) -> None:
        """Lets every packet from and to this host vanish; nobody is told, and addresses and routes stay."""
        self._switch.run("ip", "link", "set", self._port, "nomaster")

    def restore(self) -> None:
        """Ends a cut."""
        self._switch.run("ip", "link", "set", self._port, "master", "switch")

    def kill(self) -> None:
        """Takes the power away: no process is left, and no other host hears a word of it."""
        assert self._init is not None and self._unshare is not None
        self.cut()
        processes = self.processes()
        self._init.kill()
        self._unshare.wait(GONE_SECONDS)
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()
        _, left = psutil.wait_procs(processes, timeout=GONE_SECONDS)
        self._unshare = self._init = None
        with contextlib.suppress(RuntimeError):  # the kernel takes the cable away with the host, in its own time
            self._switch.run("ip", "link", "delete", self._port)
        if left:
            raise RuntimeError(f"processes of {self.name} outlive it: {left}")

    @contextlib.contextmanager
    def small_disk(self, folder: Path) -> Iterator[None]:
        """Makes `folder` a disk of its own on this host, 64 KiB small; the other hosts see the folder below."""
        folder.mkdir(parents=True, exist_ok=True)
        self.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder))
        try:
            yield
        finally:
            self._unmount(folder)

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

    def log(self) -> str:
        """What its sshd has to say."""
        path = self.folder / "sshd.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _unmount(self, path: Path) -> None:
        if self.is_on:
            self.run("umount", "--lazy", str(path))

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


def main_process(process: "subprocess.Popen[str]") -> psutil.Process:
    """The command that `VirtualHost.popen` has started, below nsenter and the shell that becomes it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            child = psutil.Process(process.pid).children()[0]
            if child.cmdline()[1:3] != ["-c", 'cd "$0" && exec "$@"']:
                return child
        assert process.poll() is None, f"the command ended with {process.returncode} at once"
        time.sleep(0.005)
    raise RuntimeError(f"the command of process {process.pid} did not start in {START_SECONDS:g} s")
