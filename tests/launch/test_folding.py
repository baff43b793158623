"""Equal lines of many ranks become one; the lines of each rank keep their order, and none is lost."""

import random

import pytest

from lowtide.launch.job.display import Folding, Line
from lowtide.watch.waiting import rank_range


def shown(lines: list[Line]) -> list[tuple[str, str]]:
    return [(rank_range(line.ranks), line.text.decode()) for line in lines]


def test_equal_lines_within_the_window_are_one() -> None:
    folding = Folding(num_ranks=5)
    for rank in (3, 0, 1, 6, 2):
        folding.add(rank, b"loading", 0.1)
    assert shown(folding.take(0.1)) == [("0-3,6", "loading")]  # all have said it: nothing to wait for


def test_a_line_waits_for_others_no_longer_than_the_window() -> None:
    folding = Folding(num_ranks=3)
    folding.add(0, b"a", 0.0)
    folding.add(1, b"a", 0.15)
    assert folding.take(0.19) == [] and folding.seconds_to_wait(0.15) == pytest.approx(0.05)
    assert shown(folding.take(0.2)) == [("0-1", "a")]
    folding.add(2, b"a", 0.21)
    assert shown(folding.take(0.5)) == [("2", "a")] and folding.seconds_to_wait(0.5) is None


def test_sequences_fold_line_by_line() -> None:
    folding = Folding(num_ranks=3)
    for rank in (0, 1):
        for text in (b"a", b"b", b"a"):
            folding.add(rank, text, 0.0)
    assert shown(folding.take(1.0)) == [("0-1", "a"), ("0-1", "b"), ("0-1", "a")]


def test_the_order_of_a_rank_is_kept() -> None:
    folding = Folding(num_ranks=3)
    for rank, text in [(0, b"a"), (0, b"b"), (1, b"b"), (1, b"a")]:
        folding.add(rank, text, 0.0)
    assert shown(folding.take(1.0)) == [("0", "a"), ("0-1", "b"), ("1", "a")]


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_lost_and_no_order_changes(seed: int) -> None:
    chance = random.Random(seed)
    folding = Folding(num_ranks=7)
    said: dict[int, list[bytes]] = {rank: [] for rank in range(7)}
    heard: dict[int, list[bytes]] = {rank: [] for rank in range(7)}
    lines = []
    for step in range(3000):
        rank, text = chance.randrange(7), bytes([chance.choice(b"abc")])
        said[rank].append(text)
        folding.add(rank, text, step / 100)
        lines += folding.take(step / 100)
    for line in [*lines, *folding.take(0.0, everything=True)]:
        for rank in line.ranks:
            heard[rank].append(line.text)
    assert heard == said


def test_held_lines_are_bounded() -> None:
    folding = Folding(num_ranks=2)
    for number in range(5000):
        folding.add(0, str(number).encode(), 0.0)
    assert [line.text for line in folding.take(0.0)] == [str(number).encode() for number in range(3000)]
