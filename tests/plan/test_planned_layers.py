"""Layer by layer, the planned peak of a rank and what it sends are what is there."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import lowtide
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.plan.choice import Choice, Space
from lowtide.engine.plan.estimate import MachineWork
from lowtide.engine.plan.layered import LayeredParts
from lowtide.engine.plan.llama import Shape, batch, build, runs_of
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.planner import Planner
from lowtide.engine.plan.stages import Stages
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW
from tests.plan.test_planned_peak import (
    BF16,
    ROWS,
    TOLERANCE,
    Case,
    LiveBytes,
    assert_planned,
    batch_of,
    config_of,
)
from tests.plan.test_planned_peak_of_stages import MODELS


def planned(model: str, config: dict[str, Any], num_ranks: int) -> tuple[int, int]:
    """(peak, bytes sent in a step)"""
    with torch.device("meta"):
        module = MODELS[model]()
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks)
    run = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu")
    profile = run.profile(batch_of(model, 0), ROWS, config["activation_checkpointing"]["every"])
    machine = Machine(devices_per_host=num_ranks, device="cpu")
    parts = LayeredParts(blueprint, machine)
    found = parts.estimate(blueprint.config, Stages(parts.split, profile, MachineWork(profile, machine)))
    return found.peak_bytes, sum(found.sent.values())


def measured(model: str, config: dict[str, Any]) -> tuple[int, int]:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[model](), config)
    whole = tuple(torch.cat([one] * config["gradient_accumulation_steps"]) for one in batch_of(model, 0))
    sent = [0]
    plain = SocketTransport._send

    def count(self: SocketTransport, tensors: dict[int, torch.Tensor], tag: int, what: str) -> Any:
        sent[0] += sum(one.nbytes for one in tensors.values()) if " of unit" in what else 0
        return plain(self, tensors, tag, what)

    engine.train_step(whole)
    with LiveBytes(engine) as live, patch.object(SocketTransport, "_send", count):
        engine.train_step(whole)
    engine.close()
    return live.peak, sent[0]


def measured_all(cases: dict[str, Case]) -> list[tuple[int, int]]:
    return [measured(*case) for case in cases.values()]


def in_layers(stage: int, every: int, accumulation: int, dtypes: dict[str, Any], **zero: Any) -> dict[str, Any]:
    zero = {"stage": stage, "layered_gradient_accumulation": True, **zero}
    return {**config_of(stage, every, accumulation, **dtypes), "zero_optimization": zero}


def cases(folder: str) -> dict[str, Case]:
    file = {"device": "nvme", "nvme_path": folder}
    return {
        "stage 0": ("gpt", in_layers(0, 0, 2, {})),
        "stage 1": ("fused", in_layers(1, 1, 2, BF16)),
        "stage 3": ("fused", in_layers(3, 1, 3, {})),
        "not ahead": ("gpt", in_layers(3, 0, 3, {}, stage3_prefetch_bucket_size=0)),
        "files": ("gpt", in_layers(3, 1, 3, {}, offload_param=file, offload_optimizer=file)),
    }


def test_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    some = cases(str(tmp_path))
    said = [planned(*case, 2) for case in some.values()]
    found = ranks(2, measured_all, some)
    peaks = [peak for peak, _ in said]
    assert_planned(some, {0: peaks, 1: peaks}, [[peak for peak, _ in of_rank] for of_rank in found])
    sent = [sent for _, sent in found[0]]  # what ranks sum of a shard may differ
    assert dict(zip(some, sent, strict=True)) == {name: told for name, (_, told) in zip(some, said, strict=True)}


def test_bounds_are_below_what_is_estimated_and_two_passes_are_sent() -> None:
    shape = Shape(layers=4, hidden=256, heads=4, vocabulary=512, sequence=64)
    plans = []
    for is_layered in (False, True):
        base = {"optimizer": ADAMW, "zero_optimization": {"layered_gradient_accumulation": is_layered}}
        machine = Machine(num_hosts=2, devices_per_host=4)
        plans.append(Planner(build(shape), base, machine, runs_of(shape), batch(shape)))
    plain, layered = plans
    space = list(Space(layered.machine, 64, layered.num_blocks, can_split=layered.can_split))
    assert {(one.pipeline, one.sequence) for one in space} == {(1, 1)} and {one.tensor for one in space} == {1, 2, 4}
    for choice in random.Random(0).sample(space, 30):
        bound, value = layered.bound(choice), layered.found(choice, 0)
        assert bound.seconds <= value.seconds and bound.nbytes <= value.nbytes and bound.fits >= value.fits, choice
    eight = Choice(stage=3, rows=1, accumulation=8)
    ratio = sum(layered.estimate(eight).sent.values()) / sum(plain.estimate(eight).sent.values())
    assert 1 / 8 <= ratio < 1.1 / 8  # what the first and the last block share is gathered for each
    assert layered.estimate(eight).step_seconds < plain.estimate(eight).step_seconds


def reported(cases: dict[str, Case], folder: str) -> list[str]:
    """What `engine.memory_report()` says beside what it has seen."""
    wrong = []
    for name, (model, config) in cases.items():
        with lowtide.initialize(MODELS[model](), {**config, "memory_report": {"folder": folder, "step": 2}}) as engine:
            whole = tuple(torch.cat([one] * config["gradient_accumulation_steps"]) for one in batch_of(model, 0))
            for _ in range(2):
                engine.train_step(whole)
            found = engine.memory_report()
        said, there = found.predicted_peak_bytes, found.peak_bytes
        if found.why_not or said is None or there is None or abs(said / there - 1) > TOLERANCE:
            wrong.append(f"{name}: {found.why_not}, said {said}, measured {there}")
    return wrong


def test_reports(ranks: RankPool, tmp_path: Path) -> None:
    some = {"stage 3": ("gpt", in_layers(3, 1, 3, BF16))}
    assert ranks(2, reported, some, str(tmp_path)) == [[], []]
