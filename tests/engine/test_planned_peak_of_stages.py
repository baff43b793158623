"""The planned peak of each rank of a pipeline is what is there."""

from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.engine.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.planning.machine import Machine
from lowtide.engine.planning.meta_run import MetaRun
from lowtide.engine.planning.pipelined import memory_by_place
from tests import models
from tests.engine.test_planned_peak import BF16, ROWS, TOLERANCE, FusedBlock, LiveBytes, batch_of, config_of
from tests.ranks import RankPool
from tests.zero.training import rank_and_world

SCHEDULES: dict[str, dict[str, Any]] = {"1f1b": {}, "interleaved": {"chunks": 2}, "zb-h1": {}, "zb-v": {}}


def gpt() -> nn.Module:
    return models.TinyGPT(width=64, layers=6)


def fused() -> nn.Module:
    return models.Chain(*(FusedBlock(128) for _ in range(4)))


MODELS = {"gpt": gpt, "fused": fused}


def planned_peak(model: str, config: dict[str, Any]) -> int:
    rank, num_ranks = rank_and_world()
    with torch.device("meta"):
        module = MODELS[model]()
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks)
    run = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu")
    profile = run.profile(batch_of(model, 0), ROWS, config["activation_checkpointing"]["every"])
    machine = Machine(devices_per_host=num_ranks, device="cpu")
    return memory_by_place(blueprint, machine, profile)[blueprint.place_of(rank)][1]


def measured_peak(model: str, config: dict[str, Any]) -> int:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[model](), config)
    microbatches = config["gradient_accumulation_steps"]
    batch = tuple(torch.cat([one] * microbatches) for one in batch_of(model, 0))
    for _ in range(2):
        engine.train_step(batch)
    live = LiveBytes(engine)
    with live:
        engine.train_step(batch)
    engine.close()
    return live.peak


def compare(cases: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    wrong = []
    for name, (model, config) in cases.items():
        said, found = planned_peak(model, config), measured_peak(model, config)
        if abs(said / found - 1) > TOLERANCE:
            wrong.append(f"{name}: planned {said:,}, measured {found:,} ({said / found - 1:+.1%})")
    return wrong


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Each stage with each schedule, each with and without checkpointing and narrow parameters."""
    found = {}
    for stage in range(4):
        for number, (schedule, more) in enumerate(SCHEDULES.items()):
            model, every = ("gpt", "fused")[(stage + number) % 2], stage // 2
            pipeline = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule, **more}}
            dtypes = BF16 if (stage + number // 2) % 2 else {}
            found[f"{model}, {schedule}, stage {stage}"] = (model, config_of(stage, every, 4, **pipeline, **dtypes))
    return found


def test_two_ranks(ranks: RankPool) -> None:
    some = dict(list(cases().items())[::2])
    assert ranks(2, compare, some) == [[], []]


def test_two_pipelines(ranks: RankPool) -> None:
    """Each stage and each schedule."""
    some = dict(list(cases().items())[3::3])
    assert ranks(4, compare, some) == [[]] * 4
