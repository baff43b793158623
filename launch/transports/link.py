"""The interface of transports, which start agents and connect to them, and a client for several transports."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..agent.process_tree import die_with_parent
from ..wire.handshake import Seal
from ..wire.loop import Loop

_KEPT_LINES = 20
_CHUNK_BYTES = 1 << 16
END_SECONDS = 2.0


@dataclass(frozen=True)
class Link:
    """A connection to an agent. index: of its host; None: the agent's Hello tells. has_talk: MAGIC comes first.

    silence_seconds: see `Channel`; None if the end of the stream always tells a loss. seal: None if nobody else can
    write to it: a pipe to a process that we started.
    """

    index: int | None
    read_fd: int
    write_fd: int
    has_talk: bool
    silence_seconds: float | None
    seal: Seal | None = None


class Events(Protocol):
    """Receives a transport's events, in the loop's thread: `Peers` of job/, which is above this room."""

    def linked(self, link: Link) -> None: ...

    def unreachable(self, index: int | None, reason: str) -> None: ...

    def talk(self, host: str, line: str) -> None: ...

    def say(self, text: str) -> None: ...


class AgentTransport:
    """Starts agents and connects to them. Methods have the defaults of a transport without that ability.

    inherits_terminal: whether the agent of host 0 has this process's stdin, stdout and stderr. advice: for the user, if
    a host does not connect.
    """

    inherits_terminal = False
    advice = ""

    def start(self, loop: Loop, hosts: Sequence[str], peers: Events) -> None:
        """Start an agent on every host, all at once, without waiting. peers: gets links and losses."""
        raise NotImplementedError

    def admit_no_more(self) -> None:
        """Refuse further connections: every host has its agent."""

    def why_lost(self, index: int) -> str:
        """Return the known reason for the end of a link, or "". Waits briefly for the program that held it."""
        return ""

    def give_up(self, index: int) -> None:
        """End the program that holds the link to a silent host."""

    def orphans_command(self, index: int, identity: str) -> list[str] | None:
        """Return a command that runs orphans.py on a host with a lost agent; None without a second way there."""
        return None

    def close(self) -> None:
        """End all connections. Called when the agents have left or are given up."""


def agent_command(*options: str, python: str = sys.executable) -> list[str]:
    """Return an agent's command line. -P: files in the user's folder cannot replace modules of the library."""
    return module_command("agent.agent", *options, python=python)


def module_command(module: str, *options: str, python: str = sys.executable) -> list[str]:
    """Return the command line of a module of launch/, as `agent_command` does."""
    return [python, "-P", "-m", f"lowtide.launch.{module}", *options]


class Client:
    """A program between this process and agents (ssh, srun, mpirun). It ends with this process.

    talk: called with `host` and each line of its stderr, and of its stdout unless that is the link.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        command: Sequence[str],
        talk: Callable[[str, str], None],
        is_link: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = loop
        self._host = host
        self._talk = talk
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest: dict[int, bytes] = {}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if is_link else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_link else subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            process_group=0,  # Ctrl-C goes to the ranks and must not cut the connection to them
            preexec_fn=die_with_parent(),  # only the main thread starts processes
        )
        said = self._process.stderr if is_link else self._process.stdout
        assert said is not None
        self._said_fd = said.fileno()
        os.set_blocking(self._said_fd, False)
        self._rest[self._said_fd] = b""
        loop.on_readable(self._said_fd, self._read)

    def link(self, index: int, silence_seconds: float) -> Link:
        """Return its stdin and stdout as a link. The caller owns the descriptors."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        # Copies, because Popen closes its files when it is collected, and the channel owns and closes these.
        read_fd, write_fd = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdin.close()
        process.stdout.close()
        return Link(index, read_fd, write_fd, True, silence_seconds)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def epitaph(self) -> str:
        """Return how it ended and its last lines. Waits briefly for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._read()
        status = self._process.poll()
        name = os.path.basename(str(self._process.args[0]))  # type: ignore[index]  # `command` is a list
        if status is None:
            how = f"{name} still runs"
        elif status < 0:
            how = f"{name} was ended by {signal.Signals(-status).name}"
        else:
            how = f"{name} ended with exit status {status}"
        return how + "".join(f"\n    {line}" for line in self.last_lines)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()

    def close(self, seconds: float = END_SECONDS) -> None:
        """Wait `seconds` for its end, then kill it."""
        self._forget()
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _forget(self) -> None:
        if self._said_fd in self._rest:
            self._loop.forget(self._said_fd)
            del self._rest[self._said_fd]

    def _read(self) -> None:
        # `epitaph` calls this outside the loop and needs all lines, so it reads until the pipe is empty.
        while self._said_fd in self._rest:
            try:
                chunk = os.read(self._said_fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            *lines, rest = (self._rest[self._said_fd] + chunk).split(b"\n")
            self._rest[self._said_fd] = rest
            if not chunk:
                lines = [rest] if rest else []
                self._forget()
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r")
                self.last_lines.append(text)
                self._talk(self._host, text)
