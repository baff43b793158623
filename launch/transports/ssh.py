"""Transport "ssh": one OpenSSH client a host, all at once; its stdin and stdout are the channel."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..wire.loop import Loop
from .link import END_SECONDS, Client, Events, agent_command, module_command

CONNECT_SECONDS = 10


@dataclass(frozen=True)
class SshOptions:
    """port: None: as ssh's configuration says. options: `Name=Value` for -o, or arguments such as `-F FILE`."""

    port: int | None = None
    options: tuple[str, ...] = ()

    def command(self, host: str, remote: Sequence[str]) -> list[str]:
        """The client's command line; `remote` reaches the host word by word."""
        words = ["ssh"]
        for option in self.options:  # ssh takes the first value of a name: what the user gives wins
            words += shlex.split(option) if option.startswith("-") else ["-o", option]
        words += ["-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        words += [] if self.port is None else ["-p", str(self.port)]
        return [*words, "--", host, shlex.join(remote)]


class SshTransport:
    """See the module."""

    inherits_terminal = False
    advice = (
        "Try `ssh HOST true` by hand: it must work without a password (keys, known_hosts). The same Python, with "
        f"lowtide, must be there: {sys.executable}. Leave hosts out with --exclude."
    )

    def __init__(self, options: SshOptions, silence_seconds: float) -> None:
        self._options = options
        self._silence_seconds = silence_seconds
        self._hosts: Sequence[str] = ()
        self._clients: list[Client] = []

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport."""
        self._hosts = hosts
        for index, host in enumerate(hosts):
            remote = agent_command("--stdio", "--index", str(index), "--silence", f"{self._silence_seconds:g}")
            client = Client(loop, host, self._command(host, remote), events.talk, is_link=True)
            self._clients.append(client)
            events.linked(client.link(index, self._silence_seconds))

    def admit_no_more(self) -> None:
        """See Transport: nobody else can."""

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return self._clients[index].epitaph()

    def give_up(self, index: int) -> None:
        """See Transport."""
        self._clients[index].kill()

    def orphans_command(self, index: int, identity: str) -> list[str]:
        """See Transport: a second ssh."""
        return self._command(self._hosts[index], module_command("agent.orphans", identity))

    def close(self) -> None:
        """See Transport."""
        deadline = time.monotonic() + END_SECONDS  # of all together: there may be hundreds
        for client in self._clients:
            client.close(max(0.0, deadline - time.monotonic()))

    def _command(self, host: str, remote: Sequence[str]) -> list[str]:
        """PYTHONPATH goes along, because the module imports lowtide."""
        path = os.environ.get("PYTHONPATH")
        before = ["env", f"PYTHONPATH={path}"] if path else []
        return self._options.command(host, [*before, *remote])
