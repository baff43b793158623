"""Stages give the same bits: at one world size, without accumulation, on every transport between CPU ranks."""

import pytest

from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, train_all

ROUTES = ("shared_memory", "sockets")
ENDS = {"zero_optimization": {"units": ["embedding", "blocks.?", "head"]}}
CASES = [
    Case(models.tiny_gpt, models.token_batch, steps=2, clip=0.3),
    Case(models.tied_gpt, models.token_batch, steps=2),
    Case(models.tiny_gpt, models.token_batch, steps=2, clip=0.3, config=ENDS),
    Case(models.mlp, models.vector_batch, steps=2, clip=0.05),
    Case(models.tiny_gpt, models.token_batch, steps=2, clip=0.3, config={"bf16": {"enabled": True}}),
]


def stages_of(case: Case, first_transport: int | None) -> list[Case]:
    """Stage 0 on both transports, the others in turn on one or the other. None: there is one rank.

    Without a prefetch, and on both transports, where parameters are narrow.
    """
    no_prefetch = {**case.config.get("zero_optimization", {}), "stage3_prefetch_bucket_size": 0}
    grid = [*(case.at(stage) for stage in (0, 0, 1, 2, 3)), case.at(3, config={"zero_optimization": no_prefetch})]
    if first_transport is None:
        return grid[1:]
    transports = [
        {"communication": {"transport": ROUTES[(first_transport + number) % 2]}} for number in range(len(grid))
    ]
    found = [one.at(one.stage, config=config) for one, config in zip(grid, transports, strict=True)]
    return found if case is CASES[-1] else found[1:-1]


@pytest.mark.parametrize(("world_size", "cases"), [(1, CASES[:1]), (2, CASES), (4, CASES[:1])])
def test_stages_agree_bitwise(ranks: RankPool, world_size: int, cases: list[Case]) -> None:
    grids = [stages_of(case, number if world_size > 1 else None) for number, case in enumerate(cases)]
    outcomes = iter(ranks(world_size, train_all, [case for grid in grids for case in grid])[0])
    for grid in grids:
        first, *others = [next(outcomes) for _ in grid]
        assert len(set(first.losses)) > 1 and first.state
        for at_stage, outcome in zip(grid[1:], others, strict=True):
            differences = first.differences(outcome)
            assert not differences, f"{at_stage.build.__name__}, {at_stage.as_config()}: {differences}"


def test_stage_2_equals_stage_3_bitwise_with_accumulation(ranks: RankPool) -> None:
    case = Case(models.tiny_gpt, models.token_batch, clip=0.3, accumulation=3, steps=2)
    stage_0, stage_1, stage_2, stage_3 = ranks(2, train_all, [case.at(stage) for stage in (0, 1, 2, 3)])[0]
    assert stage_0.differences(stage_1) == []
    assert stage_2.differences(stage_3) == []
