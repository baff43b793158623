"""Transport "local": the agent is a child of this process, and has its terminal."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Sequence

from ..guard import KILLED_SECONDS
from ..loop import Loop
from .link import Events, Link, agent_command

_END_SECONDS = 2.0


class LocalTransport:
    """One agent, of the host `index`, with stdin, stdout and stderr of this process; the channel is a socket pair.

    needs_terminal: rank 0 writes to them itself.
    """

    token = ""
    advice = "The words above are those of its Python; can it import lowtide?"

    def __init__(self, index: int = 0, needs_terminal: bool = True) -> None:
        self.inherits_terminal = needs_terminal
        self._index = index
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                agent_command("--fd", str(theirs.fileno()), "--index", str(self._index)), pass_fds=[theirs.fileno()]
            )
        write_fd = ours.dup().detach()
        events.linked(Link(self._index, ours.detach(), write_fd, False, None))

    def why_lost(self, index: int) -> str:
        """See Transport."""
        if index != self._index or self._process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        status = self._process.poll()
        if status is None:
            return f"the agent's guard (process {self._process.pid}) still runs"
        if status < 0 or status > 128:
            number = -status if status < 0 else status - 128
            return f"the agent was ended by {signal.Signals(number).name}"
        return f"the agent left with exit status {status}"

    def give_up(self, index: int) -> None:
        """See Transport. Without a silence limit it is not called."""

    def close(self) -> None:
        """See Transport."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
