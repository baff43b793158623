"""The connection between the launcher and an agent: messages, beats, and the offset of the clocks.

The launcher sends a Beat each second and the agent answers it, so that both hear each other.

[Note: silence]
The end of a peer's stream tells at once that it has ended. Silence means a cut link, a host without power, or a stopped
process. It is counted in ticks of this side's timer, not by the clock: a process that was itself stopped (Ctrl-Z, a
laptop's sleep) would find every peer silent when it wakes.
"""

import os
import time
from collections.abc import Callable

from .handshake import HandshakeError, Seal
from .loop import Loop, Timer
from .messages import Beat, Message, decode, encode

CHUNK_BYTES = 1 << 16
MAGIC = b"=== lowtide agent ==="  # a remote shell may print lines before this line
# A peer that never ends its line must not fill the memory.
_LINE_LIMIT_BYTES = 1 << 26
TICK_SECONDS = 0.5
_TICKS_PER_BEAT = 2
_DRIFT_SECONDS = 1e-4  # that two hosts' clocks may drift apart between two beats


class Outgoing:
    """Sends lines to a descriptor without blocking, and owns it. It keeps lines that are not taken yet."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._unsent = bytearray()
        self._waits = False
        self._is_broken = False
        os.set_blocking(fd, False)

    @property
    def num_bytes(self) -> int:
        """The number of waiting bytes."""
        return len(self._unsent)

    def put(self, line: bytes) -> None:
        """Send a line, without its newline. It is lost if the peer is gone."""
        if not self._is_broken:
            self._unsent += line + b"\n"
            self._write()

    def close(self) -> None:
        self._loop.forget(self._fd)
        os.close(self._fd)

    def _write(self) -> None:
        try:
            while self._unsent:
                # The view is copied first: a bytearray with a view cannot shrink.
                del self._unsent[: os.write(self._fd, memoryview(self._unsent)[:CHUNK_BYTES].tobytes())]
        except BlockingIOError:
            self._wait(True)
            return
        except OSError:  # the peer's last lines may still be unread: the reading side reports the end
            self._is_broken = True
            self._unsent.clear()
        self._wait(False)

    def _wait(self, wanted: bool) -> None:
        if wanted and not self._waits:
            self._loop.on_writable(self._fd, self._write)
        elif not wanted and self._waits:
            self._loop.forget(self._fd)
        self._waits = wanted


class Channel:
    """Sends and receives messages over two descriptors, and owns them.

    received: called for each message except beats. lost: called once with the reason when the peer is gone, never
    after `close`. silence_seconds: None: only the end of the stream counts, as always before MAGIC. sends_beats: on
    the launcher's side. talk: called for each line before MAGIC; None: without MAGIC. seal: None if nobody else
    can write to the descriptors.
    """

    def __init__(
        self,
        loop: Loop,
        read_fd: int,
        write_fd: int,
        received: Callable[[Message], None],
        lost: Callable[[str], None],
        silence_seconds: float | None,
        sends_beats: bool,
        talk: Callable[[str], None] | None = None,
        seal: Seal | None = None,
    ) -> None:
        self.clock_offset = 0.0  # the peer's time.monotonic() minus ours
        self.clock_uncertainty = float("inf")  # of the offset, in seconds; infinite before an answer
        self.lost_at = 0.0  # when the peer was lost, as far as known
        self.was_silent = False  # whether the peer was lost by silence, not by the end of its stream
        self._loop = loop
        self._read_fd = read_fd
        self._received = received
        self._lost = lost
        self._silence_limit_seconds = silence_seconds
        self._silent_seconds = 0.0  # counted in ticks: see [Note: silence]
        self._heard_at = time.monotonic()
        self._sends_beats = sends_beats
        self._talk = talk
        self._seal = seal
        self._num_ticks = 0
        self._rest = bytearray()
        self._open = True
        os.set_blocking(read_fd, False)
        self._outgoing = Outgoing(loop, write_fd)
        loop.on_readable(read_fd, self._read)
        self._timer: Timer = loop.after(TICK_SECONDS, self._tick)

    @property
    def is_open(self) -> bool:
        """Whether the peer may still send."""
        return self._open

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._outgoing.num_bytes == 0

    def send(self, message: Message) -> None:
        """Send a message without blocking. Keeps bytes not taken yet. Does nothing once the peer is lost."""
        if self._open:
            line = encode(message)
            self._outgoing.put(line if self._seal is None else self._seal.signed(line))

    def close(self) -> None:
        """Close both directions."""
        if not self._open:
            return
        self._open = False
        self._timer.cancel()
        self._loop.forget(self._read_fd)
        os.close(self._read_fd)
        self._outgoing.close()

    def _read(self) -> None:
        try:
            chunk = os.read(self._read_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection broke ({error.strerror})")
            return
        if not chunk:
            self._lose("the connection ended")
            return
        # Any bytes are a sign of life, also a part of a line.
        self._heard_at = time.monotonic()
        self._silent_seconds = 0.0
        self._rest += chunk
        # Without a new line end nothing is split. Splitting for each chunk would copy a long line again and again.
        if b"\n" not in chunk:
            if len(self._rest) > _LINE_LIMIT_BYTES:
                self._lose(f"it sent a line of more than {_LINE_LIMIT_BYTES} bytes")
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            # The line before may have closed the channel: a Leave, or a fault.
            if self._open:
                self._take(line)

    def _take(self, line: bytes) -> None:
        if self._talk is not None:
            if line.strip() == MAGIC:
                self._talk = None
            else:
                self._talk(line.decode(errors="replace").rstrip("\r"))
            return
        try:
            message = decode(line if self._seal is None else self._seal.verified(line))
        except HandshakeError as error:
            self._lose(str(error))
            return
        except ValueError as error:
            self._lose(f"it does not speak this launcher's protocol ({error}). Use the same lowtide on all hosts")
            return
        if isinstance(message, Beat):
            self._take_beat(message)
        else:
            self._received(message)

    def _take_beat(self, beat: Beat) -> None:
        now = time.monotonic()
        # A question from the launcher: the agent answers at once, so the time between is that of the way alone.
        if beat.clock is None:
            self.send(Beat(beat.sent, now))
        else:
            self._take_clock(beat.sent, beat.clock, now)

    def _take_clock(self, sent: float, answered: float, received: float) -> None:
        """Update the clock offset. answered: by the peer's clock. A quicker answer is more exact."""
        self.clock_uncertainty += _DRIFT_SECONDS
        # The true offset lies within half of the round trip of the middle (NTP, RFC 5905). The shortest trip is kept.
        if (received - sent) / 2 < self.clock_uncertainty:
            self.clock_uncertainty = (received - sent) / 2
            self.clock_offset = answered - (sent + received) / 2

    def _tick(self) -> None:
        self._timer = self._loop.after(TICK_SECONDS, self._tick)
        self._num_ticks += 1
        # No beats for a peer that takes no bytes: they would pile up. Its silence is counted in any case.
        is_time = self._num_ticks % _TICKS_PER_BEAT == 0
        if self._sends_beats and is_time and self._talk is None and self._outgoing.num_bytes < CHUNK_BYTES:
            self.send(Beat(time.monotonic()))
        if self._talk is not None or self._silence_limit_seconds is None:
            return
        if self._silent_seconds < self._silence_limit_seconds:
            self._silent_seconds += TICK_SECONDS
        else:
            self.was_silent = True
            self._lose(f"nothing was heard from it for {self._silent_seconds:g} s", self._heard_at)

    def _lose(self, reason: str, when: float | None = None) -> None:
        self.lost_at = time.monotonic() if when is None else when
        # Before the call: `lost` may start a cleanup that must not send to this channel.
        self.close()
        self._lost(reason)
