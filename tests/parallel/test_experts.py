"""Experts that ranks share train as whole ones do: losses, norms, and parameters in the end."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, train_all, train_plainly
from tests.parallel import expert_models as moe

TOLERANCE = 1e-6  # routers and losses of transformers are computed in float32
SGD: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}


def case_of(build: Callable[[], nn.Module], accumulation: int = 2) -> Case:
    return Case(build, moe.tokens, clip=0.5, accumulation=accumulation, steps=2, config={"optimizer": SGD})


def split(case: Case, stage: int, transport: str = "auto", **parallel: Any) -> Case:
    return case.at(stage, config={"parallel": parallel, "communication": {"transport": transport}})


def plainly(case: Case, num_ranks: int) -> Outcome:
    return train_plainly(case, num_ranks, partial(torch.optim.SGD, lr=0.1, momentum=0.9), num_parts=case.accumulation)


MIXTRAL = case_of(moe.mixtral)
CASES = {
    "mixtral": MIXTRAL,
    "qwen3": case_of(moe.qwen, accumulation=1),
    "deepseek": case_of(moe.deepseek, accumulation=1),
    "gpt_oss": case_of(moe.gpt_oss, accumulation=1),
}


@cache
def expected_of(name: str, num_ranks: int) -> Outcome:
    return plainly(CASES[name], num_ranks)


Row = tuple[str, int, int, dict[str, Any]]  # model, data-parallel ranks, stage, config
HOST = {"device": "cpu"}
ROWS: dict[int, list[Row]] = {  # by number of ranks
    2: [
        ("qwen3", 2, 1, {}),
        ("deepseek", 2, 2, {"zero_optimization": {"offload_optimizer": HOST}}),
        ("gpt_oss", 2, 3, {}),
        ("mixtral", 2, 3, {"activation_checkpointing": {"every": 1}, "zero_optimization": {"offload_param": HOST}}),
    ],
    4: [
        ("qwen3", 4, 3, {"parallel": {"expert": 4}}),
        (
            "mixtral",
            4,
            3,
            {"zero_optimization": {"zero_hpz_partition_size": 2}, "communication": {"transport": "sockets"}},
        ),
        ("mixtral", 2, 3, {"parallel": {"expert": 2, "pipeline": 2}}),
    ],
}


def check(ranks: RankPool, num_ranks: int, rows: list[Row]) -> None:
    cases = [CASES[name].at(stage, config=config) for name, _, stage, config in rows]
    for row, outcome in zip(rows, ranks(num_ranks, train_all, cases)[0], strict=True):
        assert_close(outcome, expected_of(row[0], row[1]), TOLERANCE, TOLERANCE, str(row))


@pytest.mark.parametrize("num_ranks", ROWS)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    check(ranks, num_ranks, [(*row[:3], {"parallel": {"expert": 2}, **row[3]}) for row in ROWS[num_ranks]])


def grouped_mixtral() -> nn.Module:
    return moe.mixtral_of("grouped_mm")


def batched_mixtral() -> nn.Module:
    return moe.mixtral_of("batched_mm")


def single_mixtral() -> nn.Module:
    return moe.mixtral_of("eager")


def test_a_split_changes_nothing_of_data_parallel_training(ranks: RankPool) -> None:
    builds = {grouped_mixtral: 3, batched_mixtral: 0, moe.mixtral_with_balance: 3}
    cases = []
    for build, stage in builds.items():
        case = case_of(build, accumulation=1)
        cases += [split(case, 1), split(case, stage, expert=2)]
    outcomes = ranks(2, train_all, cases)[0]
    for whole, found in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert found.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert found.norms == pytest.approx(whole.norms, rel=TOLERANCE)


def test_half_precision_trains_as_whole_experts_do(ranks: RankPool) -> None:
    cases = []
    for dtype in ("bf16", "fp16"):
        case = case_of(single_mixtral, accumulation=1).at(3, clip=0.0, config={dtype: {"enabled": True}})
        cases += [case, case.at(3, config={"parallel": {"expert": 2}})]
    outcomes = ranks(2, train_all, cases)[0]
    for whole, found in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert found.losses == pytest.approx(whole.losses, rel=3e-3)
        assert found.norms == pytest.approx(whole.norms, rel=3e-2)
        assert found.scales == whole.scales


def of_sequences(parallel: dict[str, int]) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    rows = {"train_batch_size": 4, "steps_per_print": 0}
    engine = lowtide.initialize(moe.plain_mixtral(), {**rows, "optimizer": SGD, "parallel": parallel})
    losses, norms = [], []
    for step in range(2):
        parts = [one.chunk(engine.data_size)[engine.data_rank] for one in moe.tokens(step, 4)]
        result = engine.train_step(dict(zip(("input_ids", "labels"), parts, strict=True)))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    engine.close()
    return losses, norms


def test_ranks_that_share_sequences_share_experts_too(ranks: RankPool) -> None:
    losses, norms = ranks(2, of_sequences, {})[0]
    found = ranks(4, of_sequences, {"sequence": 2, "expert": 2})[0]
    assert found[0] == pytest.approx(losses, rel=TOLERANCE) and found[1] == pytest.approx(norms, rel=TOLERANCE)
