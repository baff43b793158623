"""What the user sees of all ranks: written in a thread of its own, so that a slow terminal holds up nothing else.

Equal lines of many ranks, said at about the same time, become one; no line is lost and no rank's order changes.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...watch.waiting import named
from ..wire.loop import Loop
from ..wire.messages import Shown
from .outcome import StopSignals
from .peers import Peer

WINDOW_SECONDS = 0.2
_HELD_LINES = 2000
_COLOURS = (36, 33, 32, 35, 34, 31)
# A plain line without an end is shown after these seconds on a terminal, where it is repeated below what comes between,
# and in a file, where it would be cut, when it is longer than these bytes.
_UNENDED_SECONDS = 0.2
_UNENDED_BYTES = 1 << 20
_CLEAR_LINE = b"\r\x1b[K"
_SHOWN_BYTES = 1 << 16


@dataclass
class Line:
    """What `ranks` have said; first_seen: in seconds, of the first of them."""

    text: bytes
    ranks: set[int]
    first_seen: float
    number: int = field(repr=False)  # lines are numbered as they begin


class Folding:
    """Holds each line for a moment, in which the other ranks (of `num_ranks` that take part) may say it too."""

    def __init__(self, num_ranks: int, window_seconds: float = WINDOW_SECONDS) -> None:
        self._num_ranks = num_ranks
        self._window_seconds = window_seconds
        self._held: dict[int, Line] = {}
        self._by_text: dict[bytes, list[int]] = {}
        self._last: dict[int, int] = {}  # rank -> the number of its newest line
        self._numbers = itertools.count()

    def add(self, rank: int, text: bytes, now: float) -> None:
        """`rank` has said `text`: joins the first equal line that comes after what this rank has said before."""
        numbers = self._by_text.setdefault(text, [])
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
        """Removes and gives the lines that need not wait any more, in their order."""
        taken: list[Line] = []
        for line in self._held.values():
            is_due = now - line.first_seen >= self._window_seconds or len(line.ranks) >= self._num_ranks
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
        """Until `take` has something; None: nothing is held."""
        for line in self._held.values():
            return max(0.0, line.first_seen + self._window_seconds - now)
        return None


class Display:
    """Shows the output of ranks on stdout, and what the launcher says on stderr, in the order of the calls.

    hosts: rank -> name of its host. plain_rank: shown as it comes, without prefix. shown: called, from another thread,
    with the rank and the number of bytes when they have been shown. ended: called from there when all is shown after
    `finish`.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        plain_rank: int,
        shown: Callable[[int, int], None],
        ended: Callable[[], None],
    ) -> None:
        self._hosts = hosts
        self._has_many_hosts = len(set(hosts.values())) > 1
        self._plain_rank = plain_rank
        self._shown = shown
        self._ended = ended
        self.is_done = False  # whether all has been shown after `finish`
        self._is_terminal = sys.stdout.isatty()
        self._has_colours = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._folding = Folding(max(1, len(hosts) - 1))
        self._plain_rest = b""  # of the plain rank's line: not shown yet
        self._plain_open = b""  # of the plain rank's line: shown, and to be shown again when others come between
        self._plain_since = 0.0
        self._is_stdout_bad = False  # and this was said
        self._queue: queue.SimpleQueue[tuple[int, bytes] | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def output(self, rank: int, data: bytes) -> None:
        """Whole lines of a rank, or any bytes of the plain one."""
        self._queue.put((rank, data))

    def say(self, text: str) -> None:
        """A word of the launcher."""
        self._queue.put(text)

    def finish(self) -> None:
        """Nothing more comes; what is there is still shown."""
        self._queue.put(None)

    def join(self) -> None:
        """Waits for the end of the thread, which is a matter of moments once all has been shown."""
        self._thread.join()

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
                self._show_due(everything=True)
                self._end_plain_line()
                say(item)
            elif item[0] == self._plain_rank:
                self._take_plain(item[1])
                self._shown(item[0], len(item[1]))
            else:
                self._take_lines(*item)
                self._shown(item[0], len(item[1]))
            self._show_due(everything=False)
        self._show_due(everything=True)
        self.is_done = True
        self._ended()

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        waits = [self._folding.seconds_to_wait(now)]
        if self._plain_rest and self._is_terminal:
            waits.append(max(0.0, self._plain_since + _UNENDED_SECONDS - now))
        return min((wait for wait in waits if wait is not None), default=None)

    def _show_due(self, everything: bool) -> None:
        now = time.monotonic()
        is_due = self._is_terminal and now >= self._plain_since + _UNENDED_SECONDS
        if self._plain_rest and (everything or is_due or len(self._plain_rest) > _UNENDED_BYTES):
            self._show_plain(self._plain_rest)
            self._plain_rest = b""
        self._show_lines(self._folding.take(now, everything))

    def _take_plain(self, data: bytes) -> None:
        ended, end, rest = (self._plain_rest + data).rpartition(b"\n")
        if end:
            self._show_plain(ended + end)
        if b"\r" in rest or self._plain_open:  # a progress bar, or the rest of a line that is shown in part
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
            self._plain_open = state or head.rpartition(b"\r")[2] + returns  # what the terminal shows of it

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
        """To stdout. What it does not take (its reader is gone, its disk is full) is lost, as the ranks go on."""
        try:
            _write(content)
        except BrokenPipeError:
            pass
        except OSError as error:
            if not self._is_stdout_bad:
                self._is_stdout_bad = True
                say(
                    f"stdout cannot be written to: {error.strerror}; the ranks go on, and what they print is lost "
                    "while that lasts"
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
    """A word to the user on stderr; nothing where that cannot be written to, as the ranks go on."""
    with contextlib.suppress(OSError):
        print(f"lowtide launch: {text}", file=sys.stderr, flush=True)


def _write(content: bytes) -> None:
    """To stdout, however long it takes. Raises OSError where it cannot be written to."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # a rank may have set the terminal that it shares to this mode
            select.select([], [1], [])


class Screen:
    """Agents send only so much that is not shown yet: each is told of what was, so many bytes at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._display: Display | None = None
        self._peer_of: Mapping[int, Peer] = {}
        self._owed: Counter[int] = Counter()  # host -> bytes that were shown and not told to its agent

    def open(self, hosts: Mapping[int, str], peer_of: Mapping[int, Peer]) -> None:
        """For ranks, of which 0 is shown without a prefix. hosts: rank -> name of its host; peer_of: -> agent there."""
        self._peer_of = peer_of
        self._display = Display(hosts, 0, self._note_shown, ended=lambda: self._loop.post(lambda: None))

    def output(self, rank: int, text: str) -> None:
        """What a rank has printed, as its agent sends it."""
        if self._display is not None:
            self._display.output(rank, text.encode("latin-1"))

    def say(self, text: str) -> None:
        """A word of the launcher."""
        if self._display is not None and not self._display.is_done:
            self._display.say(text)
        else:
            say(text)

    def close(self, stop: StopSignals) -> None:
        """Waits until what the ranks have printed is shown; a signal ends that wait."""
        if self._display is not None:
            display, signals = self._display, stop.count
            display.finish()
            if self._loop.run(lambda: display.is_done or stop.count > signals) and display.is_done:
                display.join()  # a restart forks, which is for processes of one thread

    def _note_shown(self, rank: int, nbytes: int) -> None:
        self._loop.post(lambda: self._pay(self._peer_of[rank], nbytes))

    def _pay(self, peer: Peer, nbytes: int) -> None:
        self._owed[peer.index] += nbytes
        if self._owed[peer.index] >= _SHOWN_BYTES:
            peer.send(Shown(self._owed[peer.index]))
            self._owed[peer.index] = 0
