"""Pipelines train to the same numbers with NCCL's manners as in one process, and no message blocks the host."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, refusal, train, train_plainly
from tests.pipe import test_pipeline_failures
from tests.pipe.pipelines import (
    MICROBATCHES,
    TOLERANCE_64,
    TiedChain,
    chain_batch,
    deep_tied_gpt_64,
    pipelined,
)
from tests.pretend import group, queues

NATIVE = {"communication": {"transport": "native", "timeout_seconds": 20}}
TIED = Case(deep_tied_gpt_64, models.token_batch, clip=0.3, accumulation=MICROBATCHES, steps=2, config=NATIVE)
TIED_TWICE = Case(TiedChain, chain_batch, accumulation=2, clip=0.1, steps=2, config=NATIVE)
BESIDE_DATA = [("zb-v", 2, 1), ("dualpipe-v", 3, None)]


def train_on_device(cases: list[Case], is_eager: bool) -> list[Outcome]:
    group.register_device(is_eager)
    outcomes = [train(case) for case in cases]
    assert not queues.HOST_WAITS, queues.HOST_WAITS[0]
    return outcomes


ON_ONE_STREAM = ("interleaved", "zb-h1")


def test_schedules_train_with_tied_weights(pretend_ranks: RankPool) -> None:
    """Where all messages share a stream; each pair of ranks has one of its own below, where other schedules are."""
    case = replace(TIED, steps=1)
    expected = train_plainly(case, 1, num_parts=MICROBATCHES)
    cases = [pipelined(case, 2, schedule) for schedule in ON_ONE_STREAM]
    found = pretend_ranks(2, train_on_device, cases, True, process_group=False)[0]
    for schedule, outcome in zip(ON_ONE_STREAM, found, strict=True):
        assert_close(outcome, expected, TOLERANCE_64, TOLERANCE_64, schedule)


def test_ranks_have_different_ties(pretend_ranks: RankPool) -> None:
    expected = train_plainly(TIED_TWICE, 1, num_parts=2)
    cases = [pipelined(TIED_TWICE.at(stage), 3, "gpipe") for stage in (0, 3)]
    for outcome in pretend_ranks(3, train_on_device, cases, False, process_group=False)[0]:
        assert_close(outcome, expected, TOLERANCE_64, TOLERANCE_64)


def test_pipelines_beside_data_parallel_ranks(pretend_ranks: RankPool) -> None:
    case = replace(TIED, steps=1)
    expected = train_plainly(case, 2, num_parts=MICROBATCHES)
    cases = [
        pipelined(case.at(stage), 2, schedule, zero_optimization={"shard_size": shard_size})
        for schedule, stage, shard_size in BESIDE_DATA
    ]
    for what, outcome in zip(
        BESIDE_DATA, pretend_ranks(4, train_on_device, cases, False, process_group=False)[0], strict=True
    ):
        assert_close(outcome, expected, TOLERANCE_64, TOLERANCE_64, str(what))


def train_on_other_batches(case: Case) -> list[str]:
    """Other values or shapes on the ranks of the first pipeline: in the first step, and when both shapes were seen."""
    group.register_device()
    engine = lowtide.initialize(case.build(), case.as_config())
    other = int(engine.data_rank == 0 and engine.rank > 0)
    errors = []
    for num_same in (0, 2):
        for step in range(num_same):
            engine.train_step(case.batch(step, MICROBATCHES * (1 + step)))
        before = engine.state_dict()
        for seed, rows in ((7 + other, 1), (7, 1 + other)):
            batch = case.batch(seed, MICROBATCHES * rows)
            errors += [refusal(act, batch) for act in (engine.train_step, engine.eval_step)]
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    assert not engine.train_step(case.batch(2, MICROBATCHES)).skipped
    engine.close()
    return errors


def train_on_other_shapes(configs: list[dict[str, Any]]) -> list[str]:
    group.register_device()
    return test_pipeline_failures.train_on_other_shapes(configs)


def test_other_shapes_are_told_in_their_own_step(pretend_ranks: RankPool) -> None:
    configs = test_pipeline_failures.configs_of("1f1b", "zb-h1", **NATIVE)
    test_pipeline_failures.check(pretend_ranks(2, train_on_other_shapes, configs, process_group=False))


def of_two_blocks() -> nn.Module:
    return models.TinyGPT(layers=2, tied=True).double()


ANY_ROWS = replace(TIED, build=of_two_blocks, config={**NATIVE, "train_micro_batch_size_per_gpu": None})


def test_other_batches_are_told_in_their_own_step(pretend_ranks: RankPool) -> None:
    case = pipelined(ANY_ROWS.at(3), 2, "zb-h1")
    for rank, texts in enumerate(pretend_ranks(4, train_on_other_batches, case, process_group=False)):
        where = "not this rank's" if rank % 2 else "ranks 0, 2"
        expected = f"batch: expected the same batch on the 2 ranks of a pipeline ({where}), found different batches"
        assert len(texts) == 8 and all(text.startswith(expected) for text in texts), texts
