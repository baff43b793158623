"""Shards within groups of two, replicas between the groups: the numbers of plain torch and of stage 0."""

import time
from functools import partial

import pytest
import torch

import lowtide
from lowtide.comm.shared_segment import REDUCED, SharedCounters
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, train, train_all, train_plainly


@pytest.mark.parametrize(("transport", "accumulation"), [("shared_memory", 2), ("sockets", 1)])
def test_hybrid_sharding_equals_plain_torch(ranks: RankPool, transport: str, accumulation: int) -> None:
    """The order of sums differs: pairs of ranks first, then the pairs."""
    config = {"communication": {"transport": transport}}
    case = Case(models.short_gpt_float64, models.token_batch, clip=0.3, steps=2, config=config)
    hybrid = {"zero_optimization": {"shard_size": 2}}
    grid = [case.at(stage, accumulation=accumulation, config=hybrid) for stage in (2, 3)]
    expected = train_plainly(grid[0], 4)
    outcomes = ranks(4, train_all, grid)[0]
    for outcome in outcomes:
        assert_close(outcome, expected, 1e-10, 1e-10)
        if accumulation == 1:
            assert outcome.differences(outcomes[0]) == []


def test_hybrid_sharding_in_bf16(ranks: RankPool) -> None:
    case = Case(models.mlp, models.vector_batch, steps=2, config={"bf16": {"enabled": True}})
    hybrid = [case.at(stage, config={"zero_optimization": {"shard_size": 2}}) for stage in (1, 3)]
    stage_0, *others = ranks(4, train_all, [case, *hybrid])[0]
    for outcome in others:
        assert outcome.losses == pytest.approx(stage_0.losses, rel=1e-2)
        assert outcome.differences(others[0]) == []


def test_a_shard_group_of_one_rank_is_stage_0(ranks: RankPool) -> None:
    case = Case(models.mlp, models.vector_batch, clip=0.05)
    work = [case.at(0), *(case.at(s, config={"zero_optimization": {"shard_size": 1}}) for s in (1, 2, 3))]
    stage_0, *outcomes = ranks(2, train_all, work)[0]
    for outcome in outcomes:
        assert outcome.differences(stage_0) == []


def test_what_a_rank_does_early_waits_for_nothing(ranks: RankPool) -> None:
    """A rank that hears late of a sum must not go on with a newer one: that one needs the memory of the older one."""
    hybrid = Case(
        partial(models.Mlp, 12), models.vector_batch, stage=2, config={"zero_optimization": {"shard_size": 2}}
    )
    outcomes = ranks(4, _train_hearing_late, hybrid)
    assert outcomes[0].differences(ranks(4, train, hybrid)[0]) == []


def _train_hearing_late(case: Case) -> Outcome:
    hears = SharedCounters.has_come

    def hears_late(counters: SharedCounters, counter: int, target: int) -> bool:
        time.sleep(2e-4)
        return counter != REDUCED and hears(counters, counter, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedCounters, "has_come", hears_late)
        return train(case)


def step_after_two_backwards(transports: list[str]) -> list[float]:
    """Norms. Both are the last of their step, as far as is known when they run."""
    norms = []
    for transport in transports:
        case = Case(models.mlp_float64, models.vector_batch_float64, config={"communication": {"transport": transport}})
        config = case.at(2, config={"zero_optimization": {"shard_size": 2}}).as_config()
        torch.manual_seed(0)
        with lowtide.initialize(models.mlp_float64(), config) as engine:
            for number in range(2):
                engine(*models.vector_batch_float64(10 * engine.rank + number, 2)).backward()
            norms.append(engine.step().grad_norm.item())
    return norms


def test_another_backward_adds_to_a_sum_that_was_final(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = models.mlp_float64()
    for rank in range(4):
        for number in range(2):
            (model(*models.vector_batch_float64(10 * rank + number, 2)) / 4).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf).item()
    found = ranks(4, step_after_two_backwards, ["shared_memory", "sockets"])[0]
    assert found == pytest.approx([norm, norm], rel=1e-6)  # it is shown in float32
