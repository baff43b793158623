"""Transports whose agent of this host is a child of this process: "local" alone, "join" with those of other hosts.

"join": somebody else has started `lowtide launch` once on every host, Kubernetes for example.

The first host's is the launcher: it has an agent of its own and listens. The others become agents and connect there.
"""

import hashlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..agent.agent import TOKEN_VARIABLE, serve
from ..agent.process_tree import KILLED_SECONDS, forked, reaped
from ..hosts.host import LaunchError, Rendezvous
from ..wire.loop import Loop
from .link import Events, Link, agent_command
from .listener import Listener

_END_SECONDS = 2.0


class LocalTransport:
    """One agent, of the host `index`, with stdin, stdout and stderr of this process; the channel is a socket pair.

    It is forked and not started anew, because a second Python would double the time until the ranks start.
    needs_terminal: rank 0 writes to them itself.
    """

    advice = "Above stands what it has said."

    def __init__(self, index: int = 0, needs_terminal: bool = True) -> None:
        self.inherits_terminal = needs_terminal
        self._index = index
        self._pid: int | None = None  # of the agent's guard
        self._status: int | None = None

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport. To be called while no other thread runs."""
        ours, theirs = socket.socketpair()
        with theirs:
            read_fd, write_fd = theirs.fileno(), os.dup(theirs.fileno())
            self._pid = forked(lambda: serve(read_fd, write_fd, None, index=self._index), (read_fd, write_fd))
            os.close(write_fd)
        own_write_fd = os.dup(ours.fileno())
        events.linked(Link(self._index, ours.detach(), own_write_fd, False, None))

    def admit_no_more(self) -> None:
        """See Transport: nobody else can."""

    def why_lost(self, index: int) -> str:
        """See Transport."""
        if index != self._index or self._pid is None:
            return ""
        status = self._ended(_END_SECONDS)
        if status is None:
            return f"the agent's guard (process {self._pid}) still runs"
        if status < 0 or status > 128:
            number = -status if status < 0 else status - 128
            return f"the agent was ended by {signal.Signals(number).name}"
        return f"the agent left with exit status {status}"

    def give_up(self, index: int) -> None:
        """See Transport. Without a silence limit it is not called."""

    def orphans_command(self, index: int, identity: str) -> None:
        """See Transport: orphans of this host come to this process."""

    def close(self) -> None:
        """See Transport."""
        if self._pid is not None and self._ended(KILLED_SECONDS) is None:
            os.kill(self._pid, signal.SIGKILL)
            self._ended(KILLED_SECONDS)

    def _ended(self, timeout_seconds: float) -> int | None:
        """The guard's exit status, or None."""
        if self._status is None and self._pid is not None:
            self._status = reaped(self._pid, timeout_seconds)
        return self._status


class JoinTransport:
    """The launcher's side."""

    advice = (
        "Start `lowtide launch` with the same options on every host; each must reach the first one at its meeting port."
    )

    def __init__(
        self, rendezvous: Rendezvous, silence_seconds: float, environ: Mapping[str, str], needs_terminal: bool
    ) -> None:
        self._token = token_of(rendezvous, environ)
        self._meeting = rendezvous
        self._silence_seconds = silence_seconds
        self._own = LocalTransport(rendezvous.index, needs_terminal)
        self.inherits_terminal = needs_terminal
        self._listener: Listener | None = None

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport. Raises LaunchError where the port is taken."""
        try:
            self._listener = Listener(loop, self._meeting.port, self._token, events, self._silence_seconds)
        except OSError as error:
            raise LaunchError(
                f"the agents of the other hosts are to connect to port {self._meeting.port} of this one, which cannot "
                f"be listened at: {os.strerror(error.errno or 0)}; end the program that has it, or choose another one "
                "for all hosts (MASTER_PORT, or --meet HOST:PORT)"
            ) from error
        self._own.start(loop, hosts, events)

    def admit_no_more(self) -> None:
        """See Transport."""
        if self._listener is not None:
            self._listener.close()

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return self._own.why_lost(index)

    def give_up(self, index: int) -> None:
        """See Transport: the connection is all there is."""

    def orphans_command(self, index: int, identity: str) -> None:
        """See Transport."""

    def close(self) -> None:
        """See Transport."""
        self.admit_no_more()
        self._own.close()


def token_of(rendezvous: Rendezvous, environ: Mapping[str, str]) -> str:
    """LOWTIDE_TOKEN if it is set; else made of what all hosts of the job know: against mix-ups, not attackers."""
    return environ.get(TOKEN_VARIABLE) or hashlib.sha256(rendezvous.identity.encode()).hexdigest()


def become_agent(rendezvous: Rendezvous, wait_seconds: float, silence_seconds: float) -> NoReturn:
    """Replaces this process by the agent of its host."""
    os.environ[TOKEN_VARIABLE] = token_of(rendezvous, os.environ)
    where = f"{rendezvous.address}:{rendezvous.port}"
    command = agent_command("--connect", where, "--index", str(rendezvous.index), "--wait", f"{wait_seconds:g}")
    os.execv(sys.executable, [*command, "--silence", f"{silence_seconds:g}"])
