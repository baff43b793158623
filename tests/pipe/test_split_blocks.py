"""Which blocks a model is found to have, and how they are divided: no other division has a cheaper costliest stage."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest
from torch import nn

from lowtide.pipe.split.blocks import find_blocks
from lowtide.pipe.split.split import given_counts, partition
from tests.kit import models
from tests.kit.training import refusal
from tests.pipe.hugging_face import builder
from tests.zero.containers import Dicts


def linears(*sizes: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(size, size) for size in sizes)


def experts_beside_a_small_list() -> nn.Module:
    experts = nn.ModuleList(nn.Sequential(*linears(9, 9, 9)) for _ in range(2))
    return nn.ModuleDict({"experts": experts, "small": linears(1, 1)})


def one_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.ModuleList([layer, nn.Linear(3, 3), layer])


FOUND: dict[str, tuple[nn.Module, list[str]]] = {
    "a list": (models.TinyGPT(), ["blocks.0", "blocks.1", "blocks.2"]),
    "an encoder before a decoder": (
        builder("T5ForConditionalGeneration")(),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "elements with parameters of a sequential": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)),
        ["0", "2", "4"],
    ),
    "no lists inside blocks": (experts_beside_a_small_list(), ["experts.0", "experts.1"]),
    "what runs in a container": (Dicts(), [f"blocks.{at}.{part}" for at in range(3) for part in ("up", "down")]),
    "a block that stands in a list twice": (one_twice(), ["0", "1"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found(name: str) -> None:
    model, names = FOUND[name]
    assert list(find_blocks(model)) == names


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Bilinear(3, 3, 3), "no ModuleList and no Sequential"),
        (
            nn.ModuleDict({"only": nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "rest": nn.Linear(3, 9)}),
            "'only' (Sequential of 1 x Linear, 25% of the parameters)",
        ),
        (
            nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Bilinear(3, 3, 1)),
            "'(the model)' (Sequential of 1 x Linear, 1 x LayerNorm, 1 x Bilinear, 100% of the parameters)",
        ),
        (nn.ModuleList([nn.ReLU()]), "'(the model)' (ModuleList of nothing with parameters, 0% of the parameters)"),
    ],
)
def test_a_model_without_repeated_blocks_is_an_error_that_says_what_was_found(model: nn.Module, found: str) -> None:
    total = sum(param.numel() for param in model.parameters())
    assert refusal(find_blocks, model) == (
        f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
        "Sequential with repeated elements of the same class, which hold at least 5% of the model's "
        f"{total} parameters, found {found}; keep the repeated parts of the model in a single nn.ModuleList or "
        "nn.Sequential"
    )


# -- how they are divided ---------------------------------------------------------------------------------------------


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
