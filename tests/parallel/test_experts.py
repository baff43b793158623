"""Experts that ranks share train as whole ones do: losses, norms, and parameters in the end."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.parallel import expert_models as moe
from tests.ranks import RankPool
from tests.zero.training import Case, Outcome, assert_close, train_all, train_plainly

TOLERANCE = 1e-6  # routers and losses of transformers are computed in float32
SGD: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}


def case_of(build: Callable[[], nn.Module]) -> Case:
    return Case(build, moe.tokens, clip=0.5, accumulation=2, steps=2, config={"optimizer": SGD})


def split(case: Case, stage: int, route: str = "auto", **parallel: Any) -> Case:
    return case.at(stage, config={"parallel": parallel, "communication": {"route": route}})


def plainly(case: Case, num_ranks: int) -> Outcome:
    return train_plainly(case, num_ranks, partial(torch.optim.SGD, lr=0.1, momentum=0.9), num_parts=2)


MIXTRAL = case_of(moe.mixtral)
CASES = {
    "mixtral": MIXTRAL,
    "qwen3": case_of(moe.qwen),
    "deepseek": case_of(moe.deepseek),
    "gpt_oss": case_of(moe.gpt_oss),
}


@pytest.mark.parametrize("name", CASES)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, name: str) -> None:
    expected = plainly(CASES[name], 2)
    stages = (0, 1, 2, 3) if name == "mixtral" else ((0, 3), (1, 2))[list(CASES).index(name) % 2]
    for outcome in ranks(2, train_all, [split(CASES[name], stage, expert=2) for stage in stages])[0]:
        assert_close(outcome, expected, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek"])
def test_four_places_and_two_with_shards_train_as_one_process(ranks: RankPool, name: str) -> None:
    expected = plainly(CASES[name], 4)
    chosen = ((4, 3), (2, 1)) if name == "qwen3" else ((4, 0), (2, 3))
    cases = [split(CASES[name], stage, expert=degree) for degree, stage in chosen]
    for outcome in ranks(4, train_all, cases)[0]:
        assert_close(outcome, expected, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize(("route", "stages"), [("sockets", (0, 3)), ("native", (1, 2))])
def test_experts_and_shards_on_every_route(ranks: RankPool, route: str, stages: tuple[int, int]) -> None:
    expected = plainly(MIXTRAL, 4)
    for outcome in ranks(4, train_all, [split(MIXTRAL, stage, route, expert=2) for stage in stages])[0]:
        assert_close(outcome, expected, TOLERANCE, TOLERANCE)


BESIDE: dict[str, tuple[int, dict[str, Any]]] = {  # stage, config
    "hybrid": (3, {"zero_optimization": {"shard_size": 2}}),
    "hpz": (3, {"zero_optimization": {"zero_hpz_partition_size": 2}, "communication": {"route": "sockets"}}),
    "recomputation": (3, {"activation_checkpointing": {"every": 1}}),
    "states on the host": (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "parameters on the host": (3, {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
    "pipeline": (1, {"parallel": {"expert": 2, "pipeline": 2}}),
    "pipeline, gathered": (3, {"parallel": {"expert": 2, "pipeline": 2}}),
    "tensor": (3, {"parallel": {"expert": 2, "tensor": 2}}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_experts_beside_what_else_there_is(ranks: RankPool, name: str) -> None:
    stage, config = BESIDE[name]
    expected = plainly(MIXTRAL, 2 if len(config.get("parallel", {})) > 1 else 4)
    (found,) = ranks(4, train_all, [MIXTRAL.at(stage, config={"parallel": {"expert": 2}, **config})])[0]
    assert_close(found, expected, TOLERANCE, TOLERANCE)


def grouped_mixtral() -> nn.Module:
    return moe.mixtral_of("grouped_mm")


def batched_mixtral() -> nn.Module:
    return moe.mixtral_of("batched_mm")


def single_mixtral() -> nn.Module:
    return moe.mixtral_of("eager")


@pytest.mark.parametrize("build", [grouped_mixtral, batched_mixtral, moe.mixtral_with_balance])
def test_a_split_changes_nothing_of_data_parallel_training(ranks: RankPool, build: Callable[[], nn.Module]) -> None:
    case = case_of(build)
    whole, *others = ranks(2, train_all, [split(case, 1), *(split(case, stage, expert=2) for stage in (0, 3))])[0]
    for outcome in others:
        assert outcome.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(whole.norms, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_as_whole_experts_do(ranks: RankPool, dtype: str) -> None:
    case = case_of(single_mixtral).at(3, clip=0.0, config={dtype: {"enabled": True}})
    whole, found = ranks(2, train_all, [case, case.at(3, config={"parallel": {"expert": 2}})])[0]
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
