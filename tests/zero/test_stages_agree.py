"""Every stage trains to the numbers of plain torch; at one number of ranks, without accumulation, to the same bits."""

import pytest

from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_alike, assert_close, train_all, train_plainly

STAGES = (0, 1, 2, 3)
ACCUMULATIONS = (1, 3)
FLOAT32 = [Case(models.mlp, models.vector_batch, clip=0.05)]
FLOAT64 = [
    Case(models.tiny_gpt_float64, models.token_batch, clip=0.3, steps=2),
    Case(models.mlp_float64, models.vector_batch_float64, clip=0.05),
]
ONE_BLOCK = [Case(models.short_gpt_float64, models.token_batch, clip=0.3, steps=2)]
NATIVE = [ONE_BLOCK[0].at(0, config={"communication": {"transport": "native"}})]


@pytest.mark.parametrize(
    ("cases", "tolerance", "world_size"),
    [(ONE_BLOCK, 1e-10, 1), (FLOAT64, 1e-10, 2), (ONE_BLOCK, 1e-10, 4), (FLOAT32, 2e-5, 2), (NATIVE, 1e-10, 2)],
    ids=["float64-1", "float64-2", "float64-4", "float32-2", "float64-2-native"],
)
def test_every_stage_equals_plain_torch(ranks: RankPool, cases: list[Case], tolerance: float, world_size: int) -> None:
    """With one model, accumulation takes turns: both meet every stage where there are two."""
    turns = [(cases[0], stage, ACCUMULATIONS[stage % 2]) for stage in STAGES]
    rows = pairs(cases, STAGES, ACCUMULATIONS) if len(cases) > 1 else turns
    grid = [case.at(stage, accumulation=a) for case, stage, a in rows]
    plain = {
        (case.build, a): train_plainly(case.at(0, accumulation=a), world_size) for case in cases for a in ACCUMULATIONS
    }
    for case, outcome in zip(grid, ranks(world_size, train_all, grid)[0], strict=True):
        expected = plain[case.build, case.accumulation]
        assert min(expected.norms) > case.clip, "the norm must be clipped in every step"
        what = f"{case.build.__name__}, stage {case.stage}, accumulation {case.accumulation}"
        assert_close(outcome, expected, tolerance, tolerance, what)


def test_every_rank_has_the_same_numbers(ranks: RankPool) -> None:
    first, *others = ranks(3, train_all, [FLOAT32[0].at(stage, steps=2) for stage in STAGES])
    for outcomes in others:
        for ours, theirs in zip(outcomes, first, strict=True):
            assert (ours.losses, ours.norms, ours.lrs) == (theirs.losses, theirs.norms, theirs.lrs)
            assert ours.state == {} and theirs.state


GPT = Case(models.tiny_gpt, models.token_batch, steps=2, clip=0.3)
BITWISE = [
    GPT,
    Case(models.tied_gpt, models.token_batch, steps=2),
    Case(models.mlp, models.vector_batch, steps=2, clip=0.05),
    GPT.at(0, config={"zero_optimization": {"units": ["embedding", "blocks.?", "head"]}}),
]


@pytest.mark.parametrize(("world_size", "cases"), [(1, BITWISE[:1]), (2, BITWISE), (4, BITWISE[:1])])
def test_stages_agree_bitwise(ranks: RankPool, world_size: int, cases: list[Case]) -> None:
    """On one transport or the other in turn; tests/laws has them beside all other features."""
    transports = ("shared_memory", "sockets")
    for number, case in enumerate(cases):
        routes = [{"communication": {"transport": transports[(number + stage) % 2]}} for stage in STAGES]
        outcomes = ranks(world_size, train_all, [case.at(s, config=route) for s, route in enumerate(routes)])[0]
        assert len(set(outcomes[0].losses)) > 1 and outcomes[0].state
        assert_alike(outcomes, number)


def test_stage_2_equals_stage_3_bitwise_with_accumulation(ranks: RankPool) -> None:
    outcomes = ranks(2, train_all, [GPT.at(stage, accumulation=3) for stage in STAGES])[0]
    assert_alike(outcomes[:2])
    assert_alike(outcomes[2:])
