"""The planned peak of each rank of a pipeline is what is there."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import Footprint, MemoryPhase
from lowtide.engine.config.config import Config
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.pipelined import memory_by_place
from lowtide.engine.plan.profile import Profile, ProfilePart
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.plan.test_planned_peak import (
    BF16,
    ROWS,
    Case,
    FusedBlock,
    LiveBytes,
    assert_planned,
    batch_of,
    config_of,
    is_watched,
)


def gpt() -> nn.Module:
    return models.TinyGPT(width=64, layers=4)


def fused() -> nn.Module:
    return models.Chain(*(FusedBlock(128) for _ in range(4)))


MODELS = {"gpt": gpt, "fused": fused}


def planned(model: str, config: dict[str, Any], num_ranks: int) -> tuple[Blueprint, Profile]:
    with torch.device("meta"):
        module = MODELS[model]()
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks)
    run = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu")
    return blueprint, run.profile(batch_of(model, 0), ROWS, config["activation_checkpointing"]["every"])


def planned_peaks(model: str, config: dict[str, Any], num_ranks: int) -> list[int]:
    """By rank."""
    blueprint, profile = planned(model, config, num_ranks)
    places = memory_by_place(blueprint, Machine(devices_per_host=num_ranks, device="cpu"), profile)
    return [places[blueprint.place_of(rank)][1] for rank in range(num_ranks)]


def measured_peak(model: str, config: dict[str, Any]) -> int:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[model](), config)
    microbatches = config["gradient_accumulation_steps"]
    batch = tuple(torch.cat([one] * microbatches) for one in batch_of(model, 0))
    engine.train_step(batch)
    live = LiveBytes(engine)
    with live if is_watched() else nullcontext():
        engine.train_step(batch)
    engine.close()
    return live.peak


def measured_all(cases: list[Case]) -> list[int]:
    return [measured_peak(*case) for case in cases]


def check(cases: list[Case], by_rank: list[list[int]]) -> None:
    said = zip(*(planned_peaks(*case, len(by_rank)) for case in cases), strict=True)
    assert_planned([str(case) for case in cases], dict(enumerate(map(list, said))), by_rank)


def over_stages(schedule: str, stage: int, every: int, **more: Any) -> dict[str, Any]:
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    pipeline = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule, **chunks}}
    return config_of(stage, every, 4, **pipeline, **more)


def test_two_ranks(ranks: RankPool) -> None:
    """Each stage; of models, checkpointing and dtypes each two meet."""
    cases = [
        ("gpt", over_stages("1f1b", 0, 0)),
        ("fused", over_stages("1f1b", 1, 0, **BF16)),
        ("fused", over_stages("zb-h1", 2, 1)),
        ("gpt", over_stages("zb-v", 3, 1, **BF16)),
        ("fused", over_stages("interleaved", 0, 1, **BF16)),
    ]
    check(cases, ranks(2, measured_all, cases))


def test_two_pipelines(ranks: RankPool) -> None:
    """Whose ranks divide states, gradients and parameters."""
    cases = [
        ("gpt", over_stages("zb-v", 2, 0)),
        ("fused", over_stages("1f1b", 3, 1, **BF16)),
    ]
    check(cases, ranks(4, measured_all, cases))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", [100 * (1 + 1 + 0), 100 * (1 + 1 + 1)]), ("interleaved", [100 * (3 + 2 + 1), 100 * (3 + 2 + 1)])],
)
def test_messages_lie_at_the_ends_of_stages_and_one_ahead_for_each(schedule: str, expected: list[int]) -> None:
    """Of a model that keeps nothing, with 100 bytes between stages; and what the stage that computes has received."""
    blueprint, profile = planned("gpt", over_stages(schedule, 0, 0), 2)
    sent = replace(profile, parts={name: ProfilePart(output_bytes=100) for name in profile.parts})
    places = memory_by_place(blueprint, Machine(devices_per_host=2, device="cpu"), sent)
    assert [kinds["activation_bytes"] for kinds, _ in places] == expected


def test_gradients_of_a_stage_that_has_ended_are_final_while_another_computes() -> None:
    """Of a first block whose backward takes a gigabyte, the last of which comes when the rank's other one has ended."""
    shared = {"communication": {"transport": "shared_memory"}}  # where shards are given back after a step
    blueprint, profile = planned("fused", {**over_stages("interleaved", 1, 1, **BF16), **shared}, 4)
    parts = dict.fromkeys(profile.parts, ProfilePart())
    parts["blocks.0"] = ProfilePart(backward_start_bytes=10**9, holding_peak_bytes=10**9)
    _, peak = memory_by_place(blueprint, Machine(devices_per_host=4, device="cpu"), replace(profile, parts=parts))[0]
    footprint, (first, other) = Footprint(blueprint, 0), blueprint.places[0].trained
    added, final = footprint.gradient(first, MemoryPhase.ACCUMULATING), footprint.gradient(other, MemoryPhase.REDUCED)
    rests = footprint.at(MemoryPhase.BETWEEN_STEPS, gathers=False)
    cast = profile.cast_bytes * 4
    assert final > footprint.gradient(other, MemoryPhase.ACCUMULATING)
    assert peak == rests.parameters + rests.optimizer + rests.staging + added + final + cast + 10**9
