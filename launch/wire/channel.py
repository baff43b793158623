"""The line between the launcher and one agent: messages both ways, a sign of life each second, and the clocks' offset.

[Note: silence]
The launcher sends a Beat each second and the agent answers it, so that each hears the other. A peer that has ended is
noticed at once, by the end of its stream; silence tells only of a cut link, of a host that lost its power, or of a
process that is stopped. It is counted in ticks of this side's own timer and not by the clock, because a process that
was stopped itself (Ctrl-Z, a laptop's sleep) would find everyone silent when it wakes.
"""

import os
import time
from collections.abc import Callable

from .handshake import HandshakeError, Seal
from .loop import Loop, Timer
from .messages import Beat, Message, decode, encode

MAGIC = b"=== lowtide agent ==="  # what comes before this line from a remote shell is its own talk
_TICK_SECONDS = 0.5
_TICKS_PER_BEAT = 2
_CHUNK_BYTES = 1 << 16
_LINE_LIMIT_BYTES = 1 << 26


class Channel:
    """Sends and receives messages over two descriptors, which it owns.

    received: called for each message but beats. lost: called once, with the reason, when the peer is gone; never after
    `close`. silence_seconds: None: only the end of the stream tells, and before MAGIC too. sends_beats: the launcher's
    side. talk: called for each line before MAGIC; None: the stream begins with messages. seal: of each line both ways;
    None where nobody else can speak on the descriptors.
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
        self.clock_uncertainty = float("inf")  # of clock_offset; infinite until a beat was answered
        self.was_silent = False  # the peer was lost by silence, and not by the end of its stream
        self.lost_at = 0.0  # when the peer was gone, as far as that is known
        self._last_heard = time.monotonic()
        self._loop = loop
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._received = received
        self._lost = lost
        self._silence_seconds = silence_seconds
        self._sends_beats = sends_beats
        self._talk = talk
        self._seal = seal
        self._silent_seconds = 0.0
        self._num_ticks = 0
        self._rest = bytearray()
        self._unsent = bytearray()
        self._waits_to_write = False
        self._cannot_write = False
        self._open = True
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        loop.on_readable(read_fd, self._read)
        self._timer: Timer = loop.after(_TICK_SECONDS, self._tick)

    @property
    def is_open(self) -> bool:
        """Whether the peer may still say something."""
        return self._open

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._unsent

    def send(self, message: Message) -> None:
        """Never blocks; what the peer does not take now is kept and sent when it does. Nothing once it is gone."""
        if self._open and not self._cannot_write:
            line = encode(message)
            self._unsent += (line if self._seal is None else self._seal.signed(line)) + b"\n"
            self._write()

    def close(self) -> None:
        """Ends the stream both ways."""
        if not self._open:
            return
        self._open = False
        self._timer.cancel()
        for fd in (self._read_fd, self._write_fd):
            self._loop.forget(fd)
            os.close(fd)

    def _read(self) -> None:
        try:
            chunk = os.read(self._read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection broke ({error.strerror})")
            return
        if not chunk:
            self._lose("the connection ended")
            return
        self._last_heard = time.monotonic()
        self._silent_seconds = 0.0
        self._rest += chunk
        if b"\n" not in chunk:
            if len(self._rest) > _LINE_LIMIT_BYTES:
                self._lose(f"it sent a line of more than {_LINE_LIMIT_BYTES} bytes")
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
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
            self._lose(f"it does not speak this launcher's protocol ({error}); is its lowtide of the same version?")
            return
        if isinstance(message, Beat):
            self._take_beat(message)
        else:
            self._received(message)

    def _take_beat(self, beat: Beat) -> None:
        now = time.monotonic()
        if beat.clock is None:
            self.send(Beat(beat.sent, now))
        elif (now - beat.sent) / 2 < self.clock_uncertainty:  # the quicker the answer, the more exact the offset
            self.clock_uncertainty = (now - beat.sent) / 2
            self.clock_offset = beat.clock - (beat.sent + now) / 2

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._write_fd, memoryview(self._unsent)[:_CHUNK_BYTES].tobytes())]
        except BlockingIOError:
            self._watch_writing(True)
            return
        except OSError:  # what it said before may still be there to be read: the end of reading tells
            self._cannot_write = True
            self._unsent.clear()
        self._watch_writing(False)

    def _watch_writing(self, wanted: bool) -> None:
        if wanted and not self._waits_to_write:
            self._loop.on_writable(self._write_fd, self._write)
        elif not wanted and self._waits_to_write:
            self._loop.forget(self._write_fd)
        self._waits_to_write = wanted

    def _tick(self) -> None:
        self._timer = self._loop.after(_TICK_SECONDS, self._tick)
        self._num_ticks += 1
        is_time = self._num_ticks % _TICKS_PER_BEAT == 0
        if self._sends_beats and is_time and self._talk is None and len(self._unsent) < _CHUNK_BYTES:
            self.send(Beat(time.monotonic()))
        if self._silence_seconds is None or self._talk is not None:
            return
        if self._silent_seconds >= self._silence_seconds:
            self.was_silent = True
            self._lose(f"nothing was heard from it for {self._silent_seconds:g} s", self._last_heard)
        self._silent_seconds += _TICK_SECONDS

    def _lose(self, reason: str, when: float | None = None) -> None:
        self.lost_at = time.monotonic() if when is None else when
        self.close()
        self._lost(reason)
