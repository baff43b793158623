"""Transport "local": the agent is a child of this process, and has its terminal."""

import os
import signal
import socket
from collections.abc import Sequence

from ..agent.agent import serve
from ..agent.guard import KILLED_SECONDS
from ..agent.process_tree import forked, reaped
from ..wire.loop import Loop
from .link import Events, Link

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
