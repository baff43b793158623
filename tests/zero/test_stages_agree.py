"""Stages give the same bits: at one world size, without accumulation, on every route between CPU ranks."""

import pytest

from tests import models
from tests.ranks import RankPool
from tests.zero.training import Case, train_all

ROUTES = ("shared_memory", "sockets")
ENDS = {"zero_optimization": {"units": ["embedding", "blocks.?", "head"]}}
CASES = [
    Case(models.tiny_gpt, models.token_batch, clip=0.3),
    Case(models.tied_gpt, models.token_batch),
    Case(models.tiny_gpt, models.token_batch, clip=0.3, config=ENDS),
    Case(models.mlp, models.vector_batch, clip=0.05),
    Case(models.mlp_float64, models.vector_batch_float64),
    Case(models.tiny_gpt, models.token_batch, clip=0.3, config={"bf16": {"enabled": True}}),
]


def stages_of(case: Case, steps: int) -> list[Case]:
    no_prefetch = {**case.config.get("zero_optimization", {}), "stage3_prefetch_bucket_size": 0}
    last = case.at(3, steps=steps, config={"zero_optimization": no_prefetch})
    return [*(case.at(stage, steps=steps) for stage in (0, 1, 2, 3)), last]


@pytest.mark.parametrize(("world_size", "steps", "cases"), [(1, 3, CASES), (2, 3, CASES), (4, 2, CASES[::4])])
def test_stages_agree_bitwise(ranks: RankPool, world_size: int, steps: int, cases: list[Case]) -> None:
    """Stage 0 on both routes, the others in turn on one or the other."""
    for index, case in enumerate(cases):
        grid = stages_of(case, steps)
        if world_size > 1:
            grid = [
                at_stage.at(at_stage.stage, config={"communication": {"route": ROUTES[number % 2]}})
                for number, at_stage in enumerate([grid[0], *grid], index)
            ]
        first, *others = ranks(world_size, train_all, grid)[0]
        assert len(set(first.losses)) > 1 and first.state
        for at_stage, outcome in zip(grid[1:], others, strict=True):
            differences = first.differences(outcome)
            assert not differences, f"{at_stage.build.__name__}, {at_stage.as_config()}: {differences}"


def test_stage_2_equals_stage_3_bitwise_with_accumulation(ranks: RankPool) -> None:
    case = Case(models.tiny_gpt, models.token_batch, clip=0.3, accumulation=3)
    stage_0, stage_1, stage_2, stage_3 = ranks(2, train_all, [case.at(stage) for stage in (0, 1, 2, 3)])[0]
    assert stage_0.differences(stage_1) == []
    assert stage_2.differences(stage_3) == []
