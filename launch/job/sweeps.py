"""The launcher's side of orphans.py: on every host whose agent is lost, what the job has left is killed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..agent.orphans import MAGIC, VARIABLE
from ..transports.link import Client, Transport
from ..wire.loop import Loop

_SECONDS = 3.0
_SILENT_SECONDS = 1.0  # where the host itself may be gone; its agent, if it lives, hears nothing either and cleans up
_POLL_SECONDS = 0.02


@dataclass
class _Sweep:
    host: str
    client: Client
    seconds: float
    deadline: float
    lines: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.client.exit_status is not None or time.monotonic() >= self.deadline


class Sweeps:
    """All hosts at once; each has its time from `begin` on. say: a line for the user.

    A transport that has no second way to a host is left alone: see `Transport.orphans_command`.
    """

    def __init__(self, loop: Loop, transport: Transport, identity: str, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._transport = transport
        self._identity = identity
        self._say = say
        self._sweeps: list[_Sweep] = []

    def begin(self, index: int, host: str, was_silent: bool) -> None:
        """Starts to look on a host, and comes back at once."""
        command = self._transport.orphans_command(index, self._identity)
        if command is None:
            return
        lines: list[str] = []
        seconds = _SILENT_SECONDS if was_silent else _SECONDS
        try:
            client = Client(self._loop, host, command, lambda _, line: lines.append(line), is_link=False)
        except OSError as error:
            self._tell_failure(host, str(error))
            return
        self._sweeps.append(_Sweep(host, client, seconds, time.monotonic() + seconds, lines))

    def finish(self) -> None:
        """Waits until all have ended or their time is over, and says what they have met."""
        for sweep in self._sweeps:
            while not self._loop.run(lambda sweep=sweep: sweep.is_over, _POLL_SECONDS):  # type: ignore[misc]
                pass
            if sweep.client.exit_status is None:
                sweep.client.kill()
                how = f"no answer within {sweep.seconds:g} s"
            else:
                how = sweep.client.epitaph()  # reads the rest of what it said
            sweep.client.close()
            self._tell(sweep, how)
        self._sweeps.clear()

    def _tell(self, sweep: _Sweep, how: str) -> None:
        answer = next((line for line in sweep.lines if line.startswith(MAGIC)), None)
        if answer is None:
            self._tell_failure(sweep.host, how)
        elif met := answer.removeprefix(MAGIC).strip():
            self._say(f"{sweep.host}: what the job had left there was killed: {met}")

    def _tell_failure(self, host: str, how: str) -> None:
        self._say(
            f"{host}: could not look there for processes that the job has left: {how}\nIf that host is alive, "
            f"`grep -lz {VARIABLE}={self._identity} /proc/*/environ` finds them there."
        )
