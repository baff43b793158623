"""Blocks are divided so that no other division has a cheaper costliest stage."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from lowtide.pipe.split.split import given_counts, partition
from tests.kit.training import refusal


def all_partitions(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, num_blocks)))


def quality(counts: tuple[int, ...], costs: list[float], first: float, last: float) -> tuple[float, float]:
    """The costliest stage, and how far the stages are from even."""
    remaining = iter(costs)
    found = [sum(itertools.islice(remaining, count)) for count in counts]
    found[0] += first
    found[-1] += last
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


def test_costs_whose_sums_round_find_a_partition() -> None:
    assert sum(partition([0.1] * 30 + [0.8], 7, first=0.3)) == 31


def test_two_hundred_blocks_on_sixty_four_stages_take_no_time() -> None:
    chance = random.Random(0)
    begin = time.process_time()
    assert sum(partition([chance.random() for _ in range(200)], 64)) == 200
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_blocks_is_an_error(num_stages: int) -> None:
    assert refusal(partition, [1.0] * 3, num_stages) == (
        "pipeline: expected 1 to 3 stages, because the model has 3 blocks and each stage needs a block, "
        f"found {num_stages}; use fewer stages (ranks x chunks), or a model with more blocks"
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([1, 3, 3], "the numbers of blocks per stage must add up to the model's blocks, found 1 + 3 + 3 = 7 != 6"),
        ([3, 3], "expected a number of blocks for each of 3 stages, found 2: [3, 3]"),
        ([0, 3, 3], "expected at least one block for each stage, found [0, 3, 3]"),
        ([1.5, 1.5, 3], "expected at least one block for each stage, found [1.5, 1.5, 3]"),
    ],
)
def test_an_explicit_list_is_taken_if_it_fits(counts: list[int], text: str) -> None:
    assert given_counts([1, 3, 2], 6, 3) == (1, 3, 2)
    assert f"pipeline: {text}" in refusal(given_counts, counts, 6, 3)
