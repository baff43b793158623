"""The best of a finite set, without looking at all of it: what cannot be better than what was seen is left out.

[Note: exact]
Each item has a bound: seconds and bytes that it takes at least, which cost little to know. Items are taken in the order
of their least seconds. One is evaluated unless

- it is slower, at the least, than the last of the best that are kept; and
- something that was evaluated is no slower than its least, and no larger: then it cannot be on the front either.

So the result is that of evaluating all, ties included: these are in order of bytes, then of place in the list.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_SLOWEST = 2.0  # on the front, beside the best

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Bound:
    """At least so many seconds and bytes. fits: False where it cannot, whatever else."""

    seconds: float
    nbytes: float
    fits: bool = True


@dataclass(frozen=True)
class Found(Generic[Item, Value]):
    """An item that was evaluated."""

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
    """best: of those that fit, the fastest first. front: no other that fits is as fast and as small, up to
    twice the time of the best. beyond: what does
    not fit, and at the least is faster than the best: the first by their least seconds."""

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
    """evaluate: an item and its place in the list; seconds and bytes are no less than those of its bound."""
    bounds = [bound(item) for item in items]
    order = sorted(range(len(items)), key=lambda number: (bounds[number].seconds, bounds[number].nbytes, number))
    best: list[Found[Item, Value]] = []
    beyond: list[Found[Item, Value]] = []
    front = Front[Item, Value]()
    num_evaluated = 0
    for number in order:
        least = bounds[number]
        may_be_beyond = len(beyond) < num_beyond and (not best or least.seconds < best[0].seconds)
        may_be_best = least.fits and (len(best) < count or least.seconds <= best[-1].seconds)
        is_slow = bool(best) and least.seconds > _SLOWEST * best[0].seconds
        may_be_on_front = least.fits and not is_slow and not front.covers(least.seconds, least.nbytes)
        if not (may_be_best or may_be_on_front or may_be_beyond):
            continue
        found = evaluate(items[number], number)
        num_evaluated += 1
        if found.fits:
            _insert(best, found, count)
            front.add(found)
        elif may_be_beyond:
            beyond.append(found)
    beyond = [one for one in beyond if not best or bounds[one.number].seconds < best[0].seconds]
    members = [one for one in front.members if one.seconds <= _SLOWEST * best[0].seconds]
    return Result(tuple(best), tuple(members), tuple(beyond), len(items), num_evaluated)


def search_all(
    items: Sequence[Item],
    bound: Callable[[Item], Bound],
    evaluate: Callable[[Item, int], Found[Item, Value]],
    count: int = 10,
    num_beyond: int = 3,
) -> Result[Item, Value]:
    """The slow obvious version."""
    every = sorted((evaluate(item, number) for number, item in enumerate(items)), key=lambda found: found.order)
    fitting = [found for found in every if found.fits]
    front: list[Found[Item, Value]] = []
    for found in fitting:
        is_slow = found.seconds > _SLOWEST * fitting[0].seconds
        if not is_slow and (not front or found.nbytes < front[-1].nbytes):
            front.append(found)
    limit = fitting[0].seconds if fitting else math.inf
    bounds = {found.number: bound(found.item) for found in every if not found.fits}
    beyond = [found for found in every if not found.fits and bounds[found.number].seconds < limit]
    beyond.sort(key=lambda found: (bounds[found.number].seconds, bounds[found.number].nbytes, found.number))
    return Result(tuple(fitting[:count]), tuple(front), tuple(beyond[:num_beyond]), len(items), len(items))


class Front(Generic[Item, Value]):
    """Those of which none is both slower and larger than another, the fastest first."""

    def __init__(self) -> None:
        self.members: list[Found[Item, Value]] = []

    def covers(self, seconds: float, nbytes: float) -> bool:
        """Whether a member is faster and no larger, or no slower and smaller."""
        place = bisect.bisect_right(self.members, seconds, key=lambda one: one.seconds)
        if not place:
            return False
        last = self.members[place - 1]
        return last.nbytes < nbytes or (last.nbytes == nbytes and last.seconds < seconds)

    def add(self, found: Found[Item, Value]) -> None:
        place = bisect.bisect_left(self.members, found.order, key=lambda one: one.order)
        smallest_before = self.members[place - 1].nbytes if place else math.inf
        if found.nbytes >= smallest_before:
            return
        self.members[place:] = [
            found, *(one for one in self.members[place:] if one.nbytes < found.nbytes)
        ]  # fmt: skip


def _insert(kept: list[Found[Item, Value]], found: Found[Item, Value], count: int) -> None:
    bisect.insort(kept, found, key=lambda one: one.order)
    del kept[count:]
