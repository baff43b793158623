"""A pipeline trains to the numbers of one process: every schedule, ZeRO stage and precision, tied weights or not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, adamw, assert_close, train_all, train_plainly
from tests.pipe.pipelines import (
    MICROBATCHES,
    SCHEDULES,
    TOLERANCE_64,
    deep_gpt,
    deep_gpt_64,
    deep_tied_gpt,
    deep_tied_gpt_64,
    pipelined,
)

PLAIN = Case(deep_gpt, models.token_batch, clip=0.3, accumulation=MICROBATCHES, steps=2)
TIED = Case(deep_tied_gpt, models.token_batch, clip=0.3, accumulation=MICROBATCHES, steps=2)
PLAIN_64, TIED_64 = replace(PLAIN, build=deep_gpt_64), replace(TIED, build=deep_tied_gpt_64)


def test_every_schedule_trains_like_one_process(ranks: RankPool) -> None:
    expected = train_plainly(TIED_64, 1, num_parts=MICROBATCHES)
    cases = [pipelined(TIED_64, 2, schedule) for schedule in SCHEDULES]
    for schedule, by_rank in zip(SCHEDULES, zip(*ranks(2, train_all, cases), strict=True), strict=True):
        assert_close(by_rank[0], expected, TOLERANCE_64, TOLERANCE_64, schedule)
        for other in by_rank[1:]:
            for name in ("losses", "norms", "skipped"):
                assert getattr(other, name) == getattr(by_rank[0], name)


STAGES_BESIDE_PIPELINES = [("1f1b", 0, None), ("zb-v", 3, None), ("zb-v", 2, 1), ("1f1b", 3, 1)]


def test_every_zero_stage_trains_like_one_process(ranks: RankPool) -> None:
    expected = train_plainly(TIED_64, 2, num_parts=MICROBATCHES)
    cases = [
        pipelined(TIED_64.at(stage), 2, schedule, zero_optimization={"shard_size": shard_size})
        for schedule, stage, shard_size in STAGES_BESIDE_PIPELINES
    ]
    for what, outcome in zip(STAGES_BESIDE_PIPELINES, ranks(4, train_all, cases)[0], strict=True):
        assert_close(outcome, expected, TOLERANCE_64, TOLERANCE_64, str(what))


class PartlyUnused(models.TinyGPT):
    """A weight that nobody uses in each block, and one of the root; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__(layers=4, tied=True)
        for block in self.blocks:
            block.lonely = nn.Parameter(torch.ones(3, 5))
        self.lonely = nn.Parameter(torch.ones(7))
        self.double()


def test_what_nobody_uses_stays_as_it_was(ranks: RankPool) -> None:
    case = replace(PLAIN, build=PartlyUnused)
    for num_ranks, stages in ((2, {0: "1f1b"}), (4, {3: "zb-v"})):
        expected = train_plainly(case, num_ranks // 2, num_parts=MICROBATCHES)
        cases = [pipelined(case.at(stage), 2, schedule) for stage, schedule in stages.items()]
        for one, outcome in zip(cases, ranks(num_ranks, train_all, cases)[0], strict=True):
            assert_close(outcome, expected, TOLERANCE_64, TOLERANCE_64, str(one))


def blocks_of(model: Any) -> list[nn.Parameter]:
    return [param for block in model.blocks for param in block.parameters()]


def unfreeze(model: Any, step: int) -> None:
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index >= 2 - step)


def train_blocks(case: Case) -> dict[str, Tensor]:
    """The optimizer has the blocks alone; the first two are frozen in the beginning."""
    torch.manual_seed(0)
    model = case.build()
    unfreeze(model, 0)
    engine = lowtide.initialize(model, {**case.as_config(), "optimizer": None}, optimizer=adamw(blocks_of(model)))
    for step in range(case.steps):
        unfreeze(model, step)
        batch = case.global_batch(step, engine.data_size)
        engine.train_step(tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch))
    state = engine.state_dict()
    engine.close()
    return state


def train_blocks_plainly(case: Case, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = case.build()
    optimizer = adamw(blocks_of(model))
    for step in range(case.steps):
        unfreeze(model, step)
        model.zero_grad()
        model(*case.global_batch(step, world_size)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("schedule", "stage"), [("zb-v", 0), ("1f1b", 3)])
def test_an_optimizer_over_blocks_that_are_unfrozen_later(ranks: RankPool, schedule: str, stage: int) -> None:
    num_ranks = 4 if stage else 2
    expected = train_blocks_plainly(PLAIN_64, num_ranks // 2)
    found = ranks(num_ranks, train_blocks, pipelined(PLAIN_64.at(stage), 2, schedule))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE_64, atol=TOLERANCE_64)


def test_zero_stages_agree_bitwise_at_one_microbatch(ranks: RankPool) -> None:
    case = TIED.at(0, accumulation=1)
    first, *others = ranks(4, train_all, [pipelined(case.at(stage), 2, "1f1b") for stage in (0, 1, 3)])[0]
    for stage, other in zip((1, 3), others, strict=True):
        assert not first.differences(other), stage


def test_one_microbatch_gives_the_bits_of_one_process(ranks: RankPool) -> None:
    """But for the norm, and what is clipped by it: blocks of 1024 elements, summed in float32, begin at other
    parameters where what lies beside the transformer blocks is divided over two stages."""
    case = replace(PLAIN.at(0, accumulation=1), clip=0.0)
    (alone,) = ranks(1, train_all, [case])[0]
    for outcome in ranks(2, train_all, [pipelined(case, 2, schedule) for schedule in ("gpipe", "1f1b")])[0]:
        assert set(alone.differences(outcome)) <= {"norms"}
        torch.testing.assert_close(outcome.norms, alone.norms, rtol=1e-6, atol=0)


def test_stages_are_gathered_for_each_use_within_a_budget(ranks: RankPool) -> None:
    case = PLAIN.at(3, config={"communication": {"transport": "sockets"}})
    once, budgeted = ranks(
        4,
        train_all,
        [
            pipelined(case, 2, "interleaved"),
            pipelined(case, 2, "interleaved", zero_optimization={"stage3_max_live_parameters": 12_000}),
        ],
    )[0]
    assert not once.differences(budgeted)


def test_every_schedule_has_the_bits_of_one_process_in_bfloat16(ranks: RankPool) -> None:
    """Each microbatch's gradients are rounded alone, and summed in float32, in the order of microbatches."""
    case = PLAIN.at(0, clip=0.0, config={"bf16": {"enabled": True}})
    beside_data = case.at(2)
    (alone,), (expected,) = ranks(1, train_all, [case])[0], ranks(2, train_all, [beside_data])[0]
    found = [(alone, ranks(2, train_all, [pipelined(case, 2, schedule) for schedule in SCHEDULES])[0])]
    found += [(expected, ranks(4, train_all, [pipelined(beside_data, 2, name) for name in ("zb-h1", "zb-v")])[0])]
    for one, outcomes in found:
        for outcome in outcomes:
            assert outcome.losses == one.losses
            assert [name for name, value in one.state.items() if not torch.equal(outcome.state[name], value)] == []
            torch.testing.assert_close(outcome.norms, one.norms, rtol=1e-6, atol=0)  # squares add up in another order


def test_float16_agrees_with_one_rank(ranks: RankPool) -> None:
    case = PLAIN.at(2, config={"fp16": {"enabled": True, "initial_scale_power": 8}})
    (alone,), (outcome,) = ranks(1, train_all, [case])[0], ranks(2, train_all, [pipelined(case, 2, "zb-v")])[0]
    assert_close(outcome, alone, 2e-2, 2e-2)
    assert outcome.scales == alone.scales


def test_recomputed_blocks_give_the_same_bits(ranks: RankPool) -> None:
    cases = [
        pipelined(TIED, 2, schedule, activation_checkpointing={"every": every})
        for schedule in ("1f1b", "zb-v")
        for every in (0, 1)
    ]
    outcomes = ranks(2, train_all, cases)[0]
    for kept, recomputed in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert not kept.differences(recomputed)
