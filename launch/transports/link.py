"""How agents are started and reached: what every transport gives, and what several of them share."""

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

    silence_seconds: see `Channel`; None where a loss is always told by the end of the stream. seal: None where nobody
    else can speak on it: it is a pipe to a process that we have started.
    """

    index: int | None
    read_fd: int
    write_fd: int
    has_talk: bool
    silence_seconds: float | None
    seal: Seal | None = None


class Events(Protocol):
    """Whom a transport tells what happens; all in the loop's thread."""

    def linked(self, link: Link) -> None:
        """An agent can be spoken to."""

    def unreachable(self, index: int | None, reason: str) -> None:
        """No agent will come from this host; None: from any host that has none yet."""

    def talk(self, host: str, line: str) -> None:
        """Something on the way to the host, such as ssh, says this to the user."""

    def say(self, text: str) -> None:
        """A line for the user."""


class AgentTransport(Protocol):
    """Starts agents.

    inherits_terminal: the agent of host 0 has this process's own stdin, stdout and stderr. advice: for the user, where
    a host does not come.
    """

    inherits_terminal: bool
    advice: str

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """Starts an agent on every host, all at once, and comes back at once."""

    def admit_no_more(self) -> None:
        """Every host has its agent: no other connection is taken."""

    def why_lost(self, index: int) -> str:
        """What is known about the end of a link; "" if nothing is. Waits a moment for the end of what held it."""

    def give_up(self, index: int) -> None:
        """Ends what holds the link to a host that is not heard any more."""

    def orphans_command(self, index: int, identity: str) -> list[str] | None:
        """What runs orphans.py on a host whose agent is lost; None where only that agent's way leads there."""

    def close(self) -> None:
        """Ends whatever still connects to the agents; to be called when they have left, or are given up."""


def agent_command(*options: str, python: str = sys.executable) -> list[str]:
    """The command line of an agent. -P: no file of the user's folder stands in for a module of the library."""
    return module_command("agent.agent", *options, python=python)


def module_command(module: str, *options: str, python: str = sys.executable) -> list[str]:
    """The command line of a module of launch/, as for `agent_command`."""
    return [python, "-P", "-m", f"lowtide.launch.{module}", *options]


class Client:
    """A program between us and agents (ssh, srun, mpirun): what it says is passed on, and it ends with this process.

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
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest: dict[int, bytes] = {}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if is_link else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_link else subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            process_group=0,  # a Ctrl-C is passed on to the ranks and must not cut the line to them
            preexec_fn=die_with_parent(),  # only the main thread starts processes
        )
        said = self._process.stderr if is_link else self._process.stdout
        assert said is not None
        self._said_fd = said.fileno()
        os.set_blocking(self._said_fd, False)
        self._rest[self._said_fd] = b""
        loop.on_readable(self._said_fd, self._read)

    def link(self, index: int, silence_seconds: float) -> Link:
        """Its stdin and stdout; the descriptors belong to whom they are given."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        read_fd, write_fd = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdin.close()
        process.stdout.close()
        return Link(index, read_fd, write_fd, True, silence_seconds)

    @property
    def exit_status(self) -> int | None:
        """None: it runs."""
        return self._process.poll()

    def epitaph(self) -> str:
        """How it has ended, and the last lines that it said; waits a moment for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._read()
        status = self._process.poll()
        name = os.path.basename(str(self._process.args[0]))  # type: ignore[index]  # a list, see above
        if status is None:
            how = f"{name} still runs"
        elif status < 0:
            how = f"{name} was ended by {signal.Signals(-status).name}"
        else:
            how = f"{name} left with exit status {status}"
        return how + "".join(f"\n    {line}" for line in self._last)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def close(self, seconds: float = END_SECONDS) -> None:
        """Lets it end in so many seconds, and sees to it that it does."""
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
                self._last.append(text)
                self._talk(self._host, text)
