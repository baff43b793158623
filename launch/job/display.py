"""Show the output of all ranks, in a separate thread, so that a slow terminal delays nothing else.

Equal lines of several ranks at about the same time become a single line. No line is lost, and each rank's order stays.
"""

import bisect
import contextlib
import itertools
import os
import queue
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ...watch.waiting import named
from ..wire.loop import Loop
from ..wire.messages import PLAIN_RANK, Shown
from .outcome import StopSignals
from .peers import Peer

WINDOW_SECONDS = 0.2
_HELD_LINES = 2000
_COLOURS = (36, 33, 32, 35, 34, 31)
# A plain line without a newline is shown after these seconds on a terminal, and redrawn below later lines. In a file it
# would be cut, so it waits until it exceeds these bytes.
_UNENDED_SECONDS = 0.2
_UNENDED_BYTES = 1 << 20
_REPEATED_BYTES = 1 << 12
_CLEAR_LINE = b"\r\x1b[K"
_SHOWN_BYTES = 1 << 16


@dataclass
class Line:
    """A line that `ranks` printed. first_seen: seconds, of the first rank."""

    text: bytes
    ranks: set[int]
    first_seen: float
    number: int = field(repr=False)  # order of the lines


class Folding:
    """Holds each line for a moment, so that more ranks may print it too. num_ranks: ranks that take part."""

    def __init__(self, num_ranks: int, window_seconds: float = WINDOW_SECONDS) -> None:
        self._num_ranks = num_ranks
        self._window_seconds = window_seconds
        self._held: dict[int, Line] = {}
        self._by_text: dict[bytes, list[int]] = {}
        self._last: dict[int, int] = {}  # rank -> the number of its newest line
        self._numbers = itertools.count()

    def add(self, rank: int, text: bytes, now: float) -> None:
        """Add a rank's line: join the first equal line after this rank's last line, or start a new line."""
        numbers = self._by_text.setdefault(text, [])
        # Only a line after the rank's last line may be joined, so that each rank's lines stay in order.
        place = bisect.bisect_right(numbers, self._last.get(rank, -1))
        if place < len(numbers):
            number = numbers[place]
            self._held[number].ranks.add(rank)
        else:
            number = next(self._numbers)
            self._held[number] = Line(text, {rank}, now, number)
            numbers.append(number)
        self._last[rank] = number

    def take(self, now: float, everything: bool = False) -> list[Line]:
        """Remove and return the lines that are due, in order."""
        taken: list[Line] = []
        for line in self._held.values():
            is_due = now - line.first_seen >= self._window_seconds or len(line.ranks) >= self._num_ranks
            # A later line may be due, but it waits: lines are shown in the order of their first appearance.
            if not (everything or is_due or len(self._held) - len(taken) > _HELD_LINES):
                break
            taken.append(line)
        for line in taken:
            del self._held[line.number]
            numbers = self._by_text[line.text]
            numbers.remove(line.number)
            if not numbers:
                del self._by_text[line.text]
        return taken

    def seconds_to_wait(self, now: float) -> float | None:
        """Return the seconds until `take` has lines; None if it holds none."""
        for line in self._held.values():
            return max(0.0, line.first_seen + self._window_seconds - now)
        return None


class Display:
    """Shows ranks' output on stdout and the launcher's lines on stderr, in the order of the calls.

    It tells each agent how many of its bytes were shown, so that the agent may send more.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None  # once ranks are shown
        self._is_done = False  # whether all is shown at the end
        self._hosts: Mapping[int, str] = {}
        self._peer_of: Mapping[int, Peer] = {}
        self._owed: Counter[int] = Counter()  # host -> bytes shown that its agent does not know of
        self._is_terminal = sys.stdout.isatty()
        self._has_colours = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._plain_rest = b""  # of the plain rank's last line: not shown yet
        self._plain_open = b""  # the shown part, repeated when lines of more ranks come between
        self._plain_since = 0.0
        self._is_stdout_bad = False  # and the user knows
        self._queue: queue.SimpleQueue[tuple[int, bytes] | str | None] = queue.SimpleQueue()

    def open(self, hosts: Mapping[int, str], peer_of: Mapping[int, Peer]) -> None:
        """Begin to show ranks. PLAIN_RANK has no prefix. hosts: rank -> host name; peer_of: rank -> its agent."""
        self._hosts = hosts
        self._has_many_hosts = len(set(hosts.values())) > 1
        self._peer_of = peer_of
        # The plain rank's bytes are not folded.
        self._folding = Folding(max(1, len(hosts) - 1))
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def output(self, rank: int, text: str) -> None:
        """Show a rank's output, as its agent sent it: whole lines, or any bytes of the plain rank."""
        # Latin-1 maps each byte to a letter and back, so any bytes survive JSON.
        self._queue.put((rank, text.encode("latin-1")))

    def say(self, text: str) -> None:
        """Show a line of the launcher."""
        if self._thread is not None and not self._is_done:
            self._queue.put(text)
        else:
            say(text)

    def close(self, stop: StopSignals) -> None:
        """Wait until the ranks' output is shown, or a signal comes."""
        if self._thread is not None:
            signals = stop.count
            self._queue.put(None)
            if self._loop.run(lambda: self._is_done or stop.count > signals) and self._is_done:
                self._thread.join()  # a restart forks, so it needs a single thread

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._seconds_to_wait())
            except queue.Empty:
                self._show_due(everything=False)
                continue
            if item is None:
                break
            if isinstance(item, str):
                # Lines that ranks printed before, for example a traceback, must stand above the launcher's line.
                self._show_due(everything=True)
                self._end_plain_line()
                say(item)
            else:
                rank, data = item
                if rank == PLAIN_RANK:
                    self._take_plain(data)
                else:
                    self._take_lines(rank, data)
                # This is the display's thread, and channels belong to the loop's thread.
                self._loop.post(partial(self._pay, self._peer_of[rank], len(data)))
            self._show_due(everything=False)
        self._show_due(everything=True)
        self._is_done = True
        self._loop.post(lambda: None)  # wakes the loop, so that `close` asks again

    def _pay(self, peer: Peer, nbytes: int) -> None:
        self._owed[peer.index] += nbytes
        # Not for each piece: a message would then go back for every line. See WINDOW_BYTES in agent.py.
        if self._owed[peer.index] >= _SHOWN_BYTES:
            peer.send(Shown(self._owed[peer.index]))
            self._owed[peer.index] = 0

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        waits = [self._folding.seconds_to_wait(now)]
        if self._plain_rest and self._is_terminal:
            waits.append(max(0.0, self._plain_since + _UNENDED_SECONDS - now))
        return min((wait for wait in waits if wait is not None), default=None)

    def _show_due(self, everything: bool) -> None:
        now = time.monotonic()
        is_due = self._is_terminal and now >= self._plain_since + _UNENDED_SECONDS
        # A prompt or dots without a newline should be seen soon, but a file must not get half a line.
        if self._plain_rest and (everything or is_due or len(self._plain_rest) > _UNENDED_BYTES):
            self._show_plain(self._plain_rest)
            self._plain_rest = b""
        self._show_lines(self._folding.take(now, everything))

    def _take_plain(self, data: bytes) -> None:
        ended, end, rest = (self._plain_rest + data).rpartition(b"\n")
        if end:
            self._show_plain(ended + end)
        if b"\r" in rest or self._plain_open:  # a progress bar, or the rest of a partly shown line
            self._show_plain(rest)
            rest = b""
        if rest and not self._plain_rest:
            self._plain_since = time.monotonic()
        self._plain_rest = rest

    def _show_plain(self, data: bytes) -> None:
        if data:
            self._write(data)
            line = (self._plain_open + data).rpartition(b"\n")[2]
            head, returns, state = line.rpartition(b"\r")
            shown = state or head.rpartition(b"\r")[2] + returns  # as the terminal shows it
            self._plain_open = shown[-_REPEATED_BYTES:]  # an endless line must not fill the memory

    def _end_plain_line(self) -> None:
        if self._plain_open:
            self._write(b"\n")
            self._plain_open = b""

    def _take_lines(self, rank: int, data: bytes) -> None:
        now = time.monotonic()
        for line in data.removesuffix(b"\n").split(b"\n"):
            self._folding.add(rank, line, now)

    def _show_lines(self, lines: list[Line]) -> None:
        if not lines:
            return
        text = b"".join(self._prefix(line.ranks) + line.text + b"\n" for line in lines)
        if not self._plain_open:
            self._write(text)
        elif self._is_terminal:
            self._write(_CLEAR_LINE + text + self._plain_open)
        else:
            self._end_plain_line()
            self._write(text)

    def _write(self, content: bytes) -> None:
        """Write to stdout. If it fails (its reader is gone, the disk is full), the output is lost: the ranks go on."""
        try:
            _write(content)
        except BrokenPipeError:
            pass
        except OSError as error:
            if not self._is_stdout_bad:
                self._is_stdout_bad = True
                say(
                    f"stdout cannot be written to: {error.strerror}. The ranks continue, and their output is lost "
                    "meanwhile"
                )

    def _prefix(self, ranks: set[int]) -> bytes:
        what = named(ranks)
        hosts = {self._hosts[rank] for rank in ranks}
        if self._has_many_hosts and len(hosts) == 1:
            what = f"{hosts.pop()} {what}"
        if self._has_colours:
            return f"\x1b[{_COLOURS[min(ranks) % len(_COLOURS)]}m[{what}]\x1b[0m ".encode()
        return f"[{what}] ".encode()


def say(text: str) -> None:
    """Print a line for the user on stderr, if it can be written to."""
    with contextlib.suppress(OSError):
        print(f"lowtide launch: {text}", file=sys.stderr, flush=True)


def _write(content: bytes) -> None:
    """Write all to stdout, however long it takes. Raises OSError if it cannot be written to."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # a rank may have made the shared terminal non-blocking
            select.select([], [1], [])
