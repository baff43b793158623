"""Transports with a forked agent on this host: "local" with only that agent, "join" with agents of more hosts.

"join": for example Kubernetes has started `lowtide launch` on every host. On the first host it is the launcher,
with an agent too, and listens. On the remaining hosts it becomes an agent, and connects to the first.
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
from .link import AgentTransport, Events, Link, agent_command
from .listener import Listener

_END_SECONDS = 2.0


class LocalTransport(AgentTransport):
    """The agent of host `index`, forked, with this process's stdin, stdout and stderr. The channel is a socket pair.

    Starting a second Python instead would double the time until the ranks start. needs_terminal: rank 0 writes to the
    terminal itself.
    """

    advice = "Its output is above."

    def __init__(self, index: int = 0, needs_terminal: bool = True) -> None:
        self.inherits_terminal = needs_terminal
        self._index = index
        self._pid: int | None = None  # of the agent's guard
        self._status: int | None = None

    def start(self, loop: Loop, hosts: Sequence[str], peers: Events) -> None:
        """Fork the agent. Needs a single thread."""
        ours, theirs = socket.socketpair()
        # A copy of the agent's end in this process would hide the agent's death.
        with theirs:
            read_fd, write_fd = theirs.fileno(), os.dup(theirs.fileno())
            self._pid = forked(lambda: serve(read_fd, write_fd, None, index=self._index), (read_fd, write_fd))
            os.close(write_fd)
        own_write_fd = os.dup(ours.fileno())
        peers.linked(Link(self._index, ours.detach(), own_write_fd, False, None))

    def why_lost(self, index: int) -> str:
        """See Transport."""
        if index != self._index or self._pid is None:
            return ""
        status = self._ended(_END_SECONDS)
        if status is None:
            return f"the agent's guard (process {self._pid}) still runs"
        # Negative: a signal ended the guard itself. Above 128: a signal ended the agent, as `guarded` reports it.
        if status < 0 or status > 128:
            number = -status if status < 0 else status - 128
            return f"the agent was ended by {signal.Signals(number).name}"
        return f"the agent ended with exit status {status}"

    def close(self) -> None:
        """See Transport."""
        if self._pid is not None and self._ended(KILLED_SECONDS) is None:
            os.kill(self._pid, signal.SIGKILL)
            self._ended(KILLED_SECONDS)

    def _ended(self, timeout_seconds: float) -> int | None:
        """Return the guard's exit status, or None."""
        if self._status is None and self._pid is not None:
            self._status = reaped(self._pid, timeout_seconds)
        return self._status


class JoinTransport(AgentTransport):
    """The launcher's side of "join"."""

    advice = (
        "Start `lowtide launch` with the same options on every host. Each must reach the first host's meeting port."
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

    def start(self, loop: Loop, hosts: Sequence[str], peers: Events) -> None:
        """Listen, and fork this host's agent. Raises LaunchError if the port is taken."""
        try:
            # Before the fork: if the port is taken, no agent is left behind.
            self._listener = Listener(loop, self._meeting.port, self._token, peers, self._silence_seconds)
        except OSError as error:
            raise LaunchError(
                f"cannot listen for agents at port {self._meeting.port}: "
                f"{os.strerror(error.errno or 0)}. End the program that has the port, or choose another port for all "
                "hosts (MASTER_PORT, or --meet HOST:PORT)"
            ) from error
        self._own.start(loop, hosts, peers)

    def admit_no_more(self) -> None:
        """See Transport."""
        if self._listener is not None:
            self._listener.close()

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return self._own.why_lost(index)

    def close(self) -> None:
        """See Transport."""
        self.admit_no_more()
        self._own.close()


def token_of(rendezvous: Rendezvous, environ: Mapping[str, str]) -> str:
    """Return LOWTIDE_TOKEN if set, else a hash of the job's name: it prevents mix-ups, not attacks."""
    # Every host computes the same hash without asking another host.
    return environ.get(TOKEN_VARIABLE) or hashlib.sha256(rendezvous.identity.encode()).hexdigest()


def become_agent(rendezvous: Rendezvous, wait_seconds: float, silence_seconds: float) -> NoReturn:
    """Replace this process by the agent of its host."""
    # Through the environment: every user of the host can read command lines.
    os.environ[TOKEN_VARIABLE] = token_of(rendezvous, os.environ)
    where = f"{rendezvous.address}:{rendezvous.port}"
    command = agent_command("--connect", where, "--index", str(rendezvous.index), "--wait", f"{wait_seconds:g}")
    # Exec keeps the process id: the pod or the task ends with the agent and has its exit status.
    os.execv(sys.executable, [*command, "--silence", f"{silence_seconds:g}"])
