"""The port for agents, protected against connections without the token.

A new connection is a stranger: [Note: nothing before proof] in handshake.py. It may last PROOF_SECONDS and send
ANSWER_BYTES. All strangers together may have MAX_STRANGERS connections. A further connection replaces the oldest of the
address with the most, so an agent, within milliseconds, gets in beside a host that floods the port.
"""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable

from ..wire.handshake import ANSWER_BYTES, PROOF_SECONDS, HandshakeError, LauncherHandshake, Seal
from ..wire.loop import Loop
from .link import Events, Link

MAX_STRANGERS = 128
_SAY_SECONDS = 10.0
_PAUSE_SECONDS = 0.5  # if the system has no more descriptors


class Listener:
    """Accepts agents at a port of this host, and passes those with the token to `peers`."""

    def __init__(self, loop: Loop, port: int, token: str, peers: Events, silence_seconds: float) -> None:
        """port: 0: a free port. silence_seconds: of a `Link`. Raises OSError if the port is taken."""
        self._loop = loop
        self._token = token
        self._peers = peers
        self._silence_seconds = silence_seconds
        self._strangers: list[_Stranger] = []  # oldest first
        self._is_quiet = False  # refusals are counted until `_report_more`
        self._num_unreported = 0
        self._last_refusal = ""
        self._is_open = True
        self._socket = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
            # All agents of a large job connect in the same second.
            backlog=1024,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        loop.on_readable(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Close the port and all strangers' connections. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()
        self._report_more()

    def _accept(self) -> None:
        try:
            connection, place = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # it has disconnected
            return
        except OSError as error:
            self._pause(error)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            # Not simply the oldest: a flood from a single host would then push out the agents of all hosts.
            address = Counter(stranger.address for stranger in self._strangers).most_common(1)[0][0]
            oldest = next(stranger for stranger in self._strangers if stranger.address == address)
            self._refuse(oldest, f"{MAX_STRANGERS} connections wait for their proof, and this is the oldest")
        # A dual-stack socket shows IPv4 addresses in IPv6 form.
        address = str(place[0]).removeprefix("::ffff:")
        self._strangers.append(_Stranger(self._loop, connection, address, self._token, self._admit, self._refuse))

    def _pause(self, error: OSError) -> None:
        """Free the strangers' descriptors, and let new connections wait in the queue for a moment."""
        for stranger in [*self._strangers]:
            self._refuse(stranger, _none_left(error))
        # The port stays readable while connections wait. Watched, it would keep the loop busy without effect.
        self._loop.forget(self._socket.fileno())
        self._loop.after(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.on_readable(self._socket.fileno(), self._accept)

    def _admit(self, stranger: "_Stranger", fds: tuple[int, int], seal: Seal) -> None:
        self._strangers.remove(stranger)
        self._peers.linked(Link(None, *fds, False, self._silence_seconds, seal))

    def _refuse(self, stranger: "_Stranger", why: str) -> None:
        stranger.close()
        self._strangers.remove(stranger)
        if why:
            self._report(stranger.address, why)

    def _report(self, address: str, why: str) -> None:
        """Report a refused connection, at most every _SAY_SECONDS: a flood of strangers must not flood the user."""
        if self._is_quiet:
            self._num_unreported += 1
            self._last_refusal = f"{address}: {why}"
            return
        self._peers.say(f"a connection from {address} was refused: {why}")
        self._is_quiet = True
        self._loop.after(_SAY_SECONDS, self._report_more)

    def _report_more(self) -> None:
        if self._num_unreported:
            more = f"{self._num_unreported} more connections were refused"
            self._peers.say(f"{more}, the last from {self._last_refusal}")
        self._num_unreported, self._is_quiet = 0, False


class _Stranger:
    """A connection without proof. Ends with a call of `admit` or `refuse`.

    admit: takes over a descriptor to read and one to write. refuse: takes the reason, "" if it disconnected without a
    word, as port scans do.
    """

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        address: str,
        token: str,
        admit: Callable[["_Stranger", tuple[int, int], Seal], None],
        refuse: Callable[["_Stranger", str], None],
    ) -> None:
        self.address = address
        self._loop = loop
        self._connection = connection
        self._handshake = LauncherHandshake(token)
        self._admit = admit
        self._refuse = refuse
        self._said = b""
        connection.setblocking(False)
        loop.on_readable(connection.fileno(), self._read)
        in_time = f"it did not prove within {PROOF_SECONDS:g} s that it has this job's token"
        self._timer = loop.after(PROOF_SECONDS, lambda: refuse(self, in_time))
        with contextlib.suppress(OSError):  # `_read` notices that it has ended
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The send buffer is empty, so it takes these few bytes at once.
            connection.send(self._handshake.greeting)

    def close(self) -> None:
        """Disconnect."""
        self._forget()
        self._connection.close()

    def _forget(self) -> None:
        self._timer.cancel()
        self._loop.forget(self._connection.fileno())

    def _read(self) -> None:
        try:
            # Never beyond the answer: the next bytes are sealed, and the channel reads them.
            said = self._connection.recv(ANSWER_BYTES - len(self._said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._said += said
        if not said and not self._said:
            self._refuse(self, "")
        elif not said or b"\n" in said or len(self._said) == ANSWER_BYTES:
            self._finish()

    def _finish(self) -> None:
        try:
            welcome, seal = self._handshake.welcome(self._said)
            write_fd = os.dup(self._connection.fileno())
        except HandshakeError as error:
            self._refuse(self, str(error))
        except OSError as error:
            self._refuse(self, _none_left(error))
        else:
            # The channel watches the same descriptor, and a selector takes it once.
            self._forget()
            with contextlib.suppress(OSError):  # the channel notices that it has ended
                self._connection.send(welcome)
            self._admit(self, (self._connection.detach(), write_fd), seal)


def _none_left(error: OSError) -> str:
    return f"this host gives no more connections ({error.strerror})"
