"""Equal lines of many ranks, said at about the same time, become one; no line is lost and no rank's order changes."""

import bisect
import itertools
from dataclasses import dataclass, field

WINDOW_SECONDS = 0.2
_HELD_LINES = 2000


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
