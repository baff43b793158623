"""Blocks are divided so that no other division has a cheaper costliest stage."""

import itertools
import random
import re
import time
from collections.abc import Iterator

import pytest

from lowtide.pipe.split.split import given_counts, partition


def all_partitions(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        ends = (*cuts, num_blocks)
        yield tuple(end - begin for begin, end in zip((0, *cuts), ends, strict=True))


def stage_costs(counts: tuple[int, ...], costs: list[float], first: float, last: float) -> list[float]:
    remaining = iter(costs)
    found = [sum(itertools.islice(remaining, count)) for count in counts]
    found[0] += first
    found[-1] += last
    return found


def quality(counts: tuple[int, ...], costs: list[float], first: float, last: float) -> tuple[float, float]:
    found = stage_costs(counts, costs, first, last)
    return max(found), sum(cost**2 for cost in found)


def test_no_other_partition_is_better() -> None:
    chance = random.Random(0)
    for _ in range(1000):
        num_blocks = chance.randint(1, 8)
        num_stages = chance.randint(1, num_blocks)
        costs: list[float] = [chance.randint(0, 9) for _ in range(num_blocks)]
        first, last = chance.choice([0, 3, 20]), chance.choice([0, 5, 11])
        counts = partition([*costs[:-1], costs[-1] + last], num_stages, first)
        assert len(counts) == num_stages and sum(counts) == num_blocks and min(counts) >= 1
        best = min(quality(other, costs, first, last) for other in all_partitions(num_blocks, num_stages))
        assert quality(counts, costs, first, last) == best, (costs, num_stages, first, last)


def test_equal_blocks_are_spread_evenly() -> None:
    assert partition([1.0] * 12, 4) == (3, 3, 3, 3)
    assert sorted(partition([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_large_embedding_and_head_take_blocks_from_their_stages() -> None:
    assert partition([1.0] * 11 + [3.0], 4, first=2) == (2, 4, 4, 2)
    assert partition([1.0] * 6, 3, first=100) == (1, 2, 3) or partition([1.0] * 6, 3, first=100) == (1, 3, 2)


def test_costs_whose_sums_round_find_a_partition() -> None:
    assert sum(partition([0.1] * 30 + [0.8], 7, first=0.3)) == 31


def test_two_hundred_blocks_on_sixty_four_stages_take_no_time() -> None:
    chance = random.Random(0)
    begin = time.process_time()
    assert sum(partition([chance.random() for _ in range(200)], 64)) == 200
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_blocks_is_an_error(num_stages: int) -> None:
    text = (
        "pipeline: expected 1 to 3 stages, because the model has 3 blocks and each stage needs a block, "
        f"found {num_stages}; use fewer stages (ranks x chunks), or a model with more blocks"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        partition([1.0] * 3, num_stages)


def test_an_explicit_list_is_taken_as_it_is() -> None:
    assert given_counts([1, 3, 2], 6, 3) == (1, 3, 2)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([1, 3, 3], "the numbers of blocks per stage must add up to the model's blocks, found 1 + 3 + 3 = 7 != 6"),
        ([3, 3], "expected a number of blocks for each of 3 stages, found 2: [3, 3]"),
        ([0, 3, 3], "expected at least one block for each stage, found [0, 3, 3]"),
        ([1.5, 1.5, 3], "expected at least one block for each stage, found [1.5, 1.5, 3]"),
    ],
)
def test_an_explicit_list_that_does_not_fit_is_an_error(counts: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"pipeline: {text}")):
        given_counts(counts, 6, 3)
