"""Find the best items of a finite list, without evaluating all of them.

[Note: exact]
Each item has a cheap lower bound of its seconds and bytes. Items are visited in the order of their bounds. An item is
evaluated unless its bound shows both that

- it is slower than the last of the best items that are kept; and
- an evaluated item is as fast and as small, so that this item cannot be on the front.

So the result equals that of evaluating all items. Ties are ordered by bytes, then by place in the list.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SLOWEST = 2.0  # the front ends at this multiple of the best time

Item = TypeVar("Item")
Value = TypeVar("Value")


Bound = tuple[float, float, bool]
"""Lower bounds of an item: (seconds, bytes, False if the item cannot fit)."""


@dataclass(frozen=True)
class Found(Generic[Item, Value]):
    """An evaluated item."""

    item: Item
    value: Value
    seconds: float
    nbytes: float
    fits: bool
    number: int  # in the list

    @property
    def order(self) -> tuple[float, float, int]:
        return self.seconds, self.nbytes, self.number


@dataclass(frozen=True)
class Result(Generic[Item, Value]):
    """The result of a search.

    best: items that fit, the fastest first. front: items that fit and that no other item beats in both time and
    memory, up to twice the time of the best. beyond: items that do not fit and whose bound is faster than the best, in
    the order of their bounds.
    """

    best: tuple[Found[Item, Value], ...]
    front: tuple[Found[Item, Value], ...]
    beyond: tuple[Found[Item, Value], ...]
    num_items: int
    num_evaluated: int


def search(
    items: Sequence[Item],
    bound: Callable[[Item], Bound],
    evaluate: Callable[[Item, int], Found[Item, Value]],
    count: int = 10,
    num_beyond: int = 3,
) -> Result[Item, Value]:
    """Find the best items. evaluate: (item, place in the list) -> an evaluated item, no better than its bound."""
    bounds = [bound(item) for item in items]
    order = sorted(range(len(items)), key=lambda number: (*bounds[number][:2], number))
    best: list[Found[Item, Value]] = []
    beyond: list[Found[Item, Value]] = []
    front: list[Found[Item, Value]] = []  # no other item beats them in both time and memory; the fastest first
    num_evaluated = 0
    for number in order:
        seconds, nbytes, fits = bounds[number]
        # Fast items that do not fit tell the user how much a larger device would gain.
        may_be_beyond = len(beyond) < num_beyond and (not best or seconds < best[0].seconds)
        may_be_best = fits and (len(best) < count or seconds <= best[-1].seconds)
        # `best[0]` may still become faster, so the members are filtered again at the end.
        is_slow = bool(best) and seconds > SLOWEST * best[0].seconds
        may_be_on_front = fits and not is_slow and not _covers(front, seconds, nbytes)
        if not (may_be_best or may_be_on_front or may_be_beyond):
            continue
        found = evaluate(items[number], number)
        num_evaluated += 1
        if found.fits:
            _insert(best, found, count)
            _add(front, found)
        elif may_be_beyond:
            beyond.append(found)
    # An item that was faster than the best of its time may be slower than the final best.
    beyond = [found for found in beyond if not best or bounds[found.number][0] < best[0].seconds]
    members = [found for found in front if found.seconds <= SLOWEST * best[0].seconds]
    return Result(tuple(best), tuple(members), tuple(beyond), len(items), num_evaluated)


def _covers(front: Sequence[Found[Item, Value]], seconds: float, nbytes: float) -> bool:
    """Return whether a member of the front is faster and no larger, or no slower and smaller."""
    # Along the front bytes fall as seconds rise, so among members that are no slower the last is the smallest.
    place = bisect.bisect_right(front, seconds, key=lambda member: member.seconds)
    if not place:
        return False
    last = front[place - 1]
    return last.nbytes < nbytes or (last.nbytes == nbytes and last.seconds < seconds)


def _add(front: list[Found[Item, Value]], found: Found[Item, Value]) -> None:
    place = bisect.bisect_left(front, found.order, key=lambda member: member.order)
    if place and found.nbytes >= front[place - 1].nbytes:
        return
    # Slower members that are as large or larger are beaten now.
    front[place:] = [found, *(member for member in front[place:] if member.nbytes < found.nbytes)]


def _insert(kept: list[Found[Item, Value]], found: Found[Item, Value], count: int) -> None:
    bisect.insort(kept, found, key=lambda found: found.order)
    del kept[count:]
