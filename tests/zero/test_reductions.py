"""The order in which reductions are taken on."""

from collections.abc import Iterator
from typing import Any

from lowtide.comm import Pending
from lowtide.zero.reductions import Reductions


class Gradient:
    """Reduced in four phases. is_done: whether it is known that the next one would not wait."""

    def __init__(self, is_done: bool) -> None:
        self.phase, self.is_done = 0, is_done

    def collect(self, boundary: bool) -> Iterator[Pending]:
        for phase in range(4):
            self.phase = phase
            yield Pending(lambda: None, lambda: self.is_done)


def test_a_newer_reduction_does_not_overtake_an_older_one() -> None:
    """Each transport must see the same order on all ranks, however late a rank hears of what others have done."""
    older: Any = Gradient(is_done=False)
    newer: Any = Gradient(is_done=True)
    reductions = Reductions()
    for gradient in (older, newer):
        reductions.start(gradient, boundary=False)
    for _ in range(3):
        reductions.poll()
    assert (older.phase, newer.phase) == (1, 1)
    older.is_done = True
    reductions.poll()
    assert (older.phase, newer.phase) == (2, 2)
