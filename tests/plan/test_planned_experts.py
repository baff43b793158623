"""Plans of experts that ranks share, where routers choose each as often: tokens on their way, and refusals."""

from functools import cache
from math import ceil, comb
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import lowtide
from lowtide.engine.blueprint.axes import EXPERT
from lowtide.engine.config.config import Config
from lowtide.engine.model.prepared_model import tiles_of
from lowtide.engine.plan.choice import Choice
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.planner import Planner, Profiler
from lowtide.engine.plan.splits import PlannedSplits
from tests.parallel.test_expert_lists import skipping

LAYERS, WIDTH, INNER, EXPERTS, TOKENS, CHOICES = 2, 64, 96, 4, 32, 2
BASE: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "adamw"}, "steps_per_print": 0}
IDS = {name: torch.zeros(1, TOKENS, dtype=torch.int64) for name in ("input_ids", "labels")}


@cache
def mixtral() -> nn.Module:
    experts: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": TOKENS}
    with torch.device("meta"):
        return MixtralForCausalLM(MixtralConfig(**sizes, **experts))


def planner() -> Planner:
    machine = Machine(devices_per_host=4, device_bytes=40e6, reserved_bytes=0)

    def make_profiler(blueprint: Any) -> Profiler:
        tiles, splits = tiles_of(Config.load(BASE)), PlannedSplits.of(blueprint)
        return MetaRun(mixtral(), blueprint.units, blueprint.dtypes, "cuda", None, True, tiles, splits).profile

    return Planner(mixtral(), BASE, machine, make_profiler, IDS, least_tokens=16)


@pytest.mark.parametrize("degree", [2, 4])
def test_tokens_on_their_way_are_those_of_the_formula(degree: int) -> None:
    """docs/parallelism.md: a row for each token and rank, there and back, and the same in the backward."""
    profile = planner().profile(1, 0, degrees=Choice(expert=degree))
    calls = [call for part in profile.parts.values() for call in part.exchanges]
    missed = comb(EXPERTS - EXPERTS // degree, CHOICES) / comb(EXPERTS, CHOICES)  # a rank that a token does not go to
    rows = 4 * ceil(TOKENS * (degree - 1) * (1 - missed)) * WIDTH * 2
    numbers = TOKENS * CHOICES * (degree - 1) // degree * (4 + 2 * 4)  # and float32 weights, with their gradients
    counts = 8 * CHOICES * degree * (degree - 1)
    assert {call.axis for call in calls} == {EXPERT}
    assert sum(call.sent for call in calls) == LAYERS * (rows + numbers + counts)


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts\(4\) % expert\(8\)"):
        lowtide.plan(mixtral(), {**BASE, "parallel": {"expert": 8}}, world_size=8, sample_batch=IDS)


def test_experts_in_lists_are_refused() -> None:
    """Which of them are called, with how many tokens, only values say."""
    with pytest.raises(ValueError, match=r"experts in a single module, found the list 'layers.0.moe.experts'"):
        lowtide.plan(skipping(), {**BASE, "parallel": {"expert": 2}}, world_size=2, sample_batch=torch.zeros(4, 6))
