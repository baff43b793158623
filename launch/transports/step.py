"""What the transports have in common whose agents are started by one command and connect to this process."""

import os
import secrets
from collections.abc import Callable, Sequence

from ..agent.agent import TOKEN_VARIABLE
from ..checks.reach import own_addresses
from ..wire.loop import Loop
from .link import Client, Events, agent_command
from .listener import Listener

_POLL_SECONDS = 0.5


class StepTransport:
    """Listens, runs `command(agent's command line, hosts)` once, and takes whom it starts.

    A random token comes to the agents by the environment, which the command passes on, and never by a command line.
    """

    inherits_terminal = False
    advice = "The command that starts the agents must reach every host, and every host must reach this one by TCP."

    def __init__(self, command: Callable[[Sequence[str], Sequence[str]], list[str]], silence_seconds: float) -> None:
        self._token = secrets.token_hex(16)
        self._command = command
        self._silence_seconds = silence_seconds
        self._client: Client | None = None
        self._listener: Listener | None = None

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport."""
        self._listener = Listener(loop, 0, self._token, events, self._silence_seconds)
        own = own_addresses(os.environ) or ("127.0.0.1",)
        where = ",".join(f"[{address}]:{self._listener.port}" for address in own)
        agent = agent_command("--connect", where, "--silence", f"{self._silence_seconds:g}")
        command = self._command(agent, hosts)
        environment = {**os.environ, TOKEN_VARIABLE: self._token}
        self._client = Client(loop, command[0], command, events.talk, is_link=False, environment=environment)
        loop.after(_POLL_SECONDS, lambda: self._look(loop, events))

    def admit_no_more(self) -> None:
        """See Transport."""
        if self._listener is not None:
            self._listener.close()

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return "" if self._client is None or self._client.exit_status is None else self._client.epitaph()

    def give_up(self, index: int) -> None:
        """See Transport: the step goes on for the other hosts."""

    def orphans_command(self, index: int, identity: str) -> None:
        """See Transport: a second step might wait for the first one's place."""

    def close(self) -> None:
        """See Transport."""
        self.admit_no_more()
        if self._client is not None:
            self._client.close()

    def _look(self, loop: Loop, events: Events) -> None:
        if self._client is None or self._client.exit_status is None:
            loop.after(_POLL_SECONDS, lambda: self._look(loop, events))
        else:
            events.unreachable(None, self._client.epitaph())
