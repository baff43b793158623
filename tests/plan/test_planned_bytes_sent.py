"""Planned bytes on links are those that a rank sends."""

from typing import Any
from unittest.mock import patch

import torch

import lowtide
from lowtide.comm.p2p import P2P
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.plan.estimate import MachineWork, estimate
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.pipelined import PipelineParts, ScheduleRun, recurrence_of
from lowtide.engine.plan.splits import PlannedSplits
from lowtide.engine.plan.stages import Stages
from tests.engine.test_blueprint import config_of, frozen_gpt, quantized_cases
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import rank_and_world
from tests.plan.test_planned_splits import ExpertGPT
from tests.plan.test_planned_splits import batch as batch_of_experts

BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def sent(config: dict[str, Any]) -> int:
    """In the second step, by gathers and reductions of groups."""
    counted = [0]
    plain = SocketTransport._send

    def count(self: SocketTransport, tensors: dict[int, torch.Tensor], tag: int, what: str) -> Any:
        counted[0] += sum(one.nbytes for one in tensors.values()) if " of unit" in what else 0
        return plain(self, tensors, tag, what)

    engine = lowtide.initialize(frozen_gpt(4), config)
    rows = 2 * (engine.config.gradient_accumulation_steps or 1)
    engine.train_step(models.token_batch(0, rows))
    with patch.object(SocketTransport, "_send", count):
        engine.train_step(models.token_batch(1, rows))
    engine.close()
    return counted[0]


def planned(config: dict[str, Any], num_ranks: int) -> int:
    with torch.device("meta"):
        model = frozen_gpt(4)
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), model, num_ranks)
    profile = MetaRun(model, blueprint.units, blueprint.dtypes, "cpu").profile(models.token_batch(0, 2), 2, 0)
    return sum(estimate(blueprint, Machine(devices_per_host=num_ranks, device="cpu"), profile).sent.values())


def compare(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Where they differ, on rank 0; on others what of a shard they sum may be a little more or less."""
    rank, num_ranks = rank_and_world()
    found = {name: sent(config) for name, config in cases.items()}
    assert all(there > 0 for there in found.values())
    said = {name: planned(config, num_ranks) for name, config in cases.items()} if not rank else found
    return [f"{name}: planned {said[name]}, sent {there}" for name, there in found.items() if said[name] != there]


def test_two_ranks(ranks: RankPool) -> None:
    cases = {f"stage {stage}": config_of(stage, 1 + stage % 2, **(BF16 if stage > 1 else {})) for stage in range(4)}
    cases["five microbatches"] = config_of(3, 5)
    cases["no prefetch"] = config_of(3, zero={"stage3_prefetch_bucket_size": 0})
    assert ranks(2, compare, cases) == [[], []]


def test_several_axes(ranks: RankPool) -> None:
    cases = {
        "hybrid": config_of(3, 2, zero={"shard_size": 2}, **BF16),
        "hpZ": config_of(3, 1, zero={"zero_hpz_partition_size": 2}, **BF16),
        **quantized_cases(),
    }
    assert ranks(4, compare, cases) == [[]] * 4


def compare_stages(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Of messages between stages with sums of tied weights, and of groups: on the first ranks of both places."""
    wrong = []
    for name, config in cases.items():
        there = sent_between_stages(config)
        assert min(there) > 0, there
        is_first = rank_and_world()[0] % 2 == 0  # others may sum a little more or less of a shard
        if is_first and (said := planned_between_stages(config)) != there:
            wrong.append(f"{name}: planned {said}, sent {there}")
    return wrong


def sent_between_stages(config: dict[str, Any]) -> tuple[int, int]:
    """(between stages, by gathers and reductions of groups)."""
    counted = [0, 0]
    plain, plain_of_groups = P2P.send, SocketTransport._send

    def count_of_groups(self: SocketTransport, tensors: dict[int, torch.Tensor], tag: int, what: str) -> Any:
        is_counted = " of unit" in what or "tied" in what
        counted[1] += sum(one.nbytes for one in tensors.values()) if is_counted else 0
        return plain_of_groups(self, tensors, tag, what)

    def count(self: P2P, tensor: torch.Tensor, place: int, tag: int, what: str) -> Any:
        counted[0] += tensor.nbytes
        return plain(self, tensor, place, tag, what)

    engine = lowtide.initialize(models.tied_gpt(), config)
    batch = models.token_batch(0, 2 * config["gradient_accumulation_steps"])
    engine.train_step(batch)
    with patch.object(P2P, "send", count), patch.object(SocketTransport, "_send", count_of_groups):
        engine.train_step(batch)
    engine.close()
    return counted[0], counted[1]


def planned_between_stages(config: dict[str, Any]) -> tuple[int, int]:
    rank, num_ranks = rank_and_world()
    with torch.device("meta"):
        model = models.tied_gpt()
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), model, num_ranks)
    assert blueprint.pipeline is not None
    profile = MetaRun(model, blueprint.units, blueprint.dtypes, "cpu").profile(models.token_batch(0, 2), 2, 0)
    machine, schedule = Machine(devices_per_host=num_ranks, device="cpu"), blueprint.pipeline.schedule
    stages = Stages(blueprint.pipeline.split, profile, MachineWork(profile, machine))
    run = ScheduleRun.of(recurrence_of(schedule), stages.costs(0.0), schedule.num_microbatches)
    found = PipelineParts(blueprint, machine).sent(stages, run)[blueprint.place_of(rank)]
    return found["pipe"], found["intra"] + found["inter"]


def test_between_stages(ranks: RankPool) -> None:
    pipeline: dict[str, Any] = {"parallel": {"pipeline": 2}}
    cases = {
        "stage 2": config_of(2, 4, **pipeline, **BF16),
        "halves": config_of(2, 4, **pipeline, pipeline={"schedule": "zb-h1"}, **BF16),
        "stage 3": config_of(3, 5, **pipeline),
    }
    assert ranks(4, compare_stages, cases) == [[]] * 4


def planned_of_experts(config: dict[str, Any]) -> dict[str, int]:
    _, num_ranks = rank_and_world()
    with torch.device("meta"):
        module = ExpertGPT()
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks)
    profile = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu", splits=PlannedSplits.of(blueprint, 0)).profile(
        batch_of_experts(1), 2, 0
    )
    machine = Machine(devices_per_host=num_ranks, device="cpu")
    whole = sum(estimate(blueprint, machine, profile).sent.values())
    calls = [call for part in profile.parts.values() for call in part.exchanges]
    tokens = sum(call.sent for call in calls) * config["gradient_accumulation_steps"]
    return {"tokens": tokens, "groups": whole - tokens}


def of_all_experts(configs: list[dict[str, Any]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    return [of_experts(config) for config in configs]


def of_experts(config: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """(planned on rank 0, sent) in a step: tokens to experts and back, gradients and parameters of groups."""
    rows = 2 * config["gradient_accumulation_steps"]
    found = {"tokens": 0, "groups": 0}
    plain = SocketTransport._send

    def count(self: SocketTransport, tensors: dict[int, torch.Tensor], tag: int, what: str) -> Any:
        for kind, name in (("tokens", "experts"), ("groups", " of unit")):
            found[kind] += sum(one.nbytes for one in tensors.values()) if name in what else 0
        return plain(self, tensors, tag, what)

    torch.manual_seed(0)
    engine = lowtide.initialize(ExpertGPT(), config)
    engine.train_step(batch_of_experts(rows))
    with patch.object(SocketTransport, "_send", count):
        engine.train_step(batch_of_experts(rows))
    engine.close()
    return {} if engine.rank else planned_of_experts(config), found


def test_gradients_of_experts_and_their_tokens(ranks: RankPool) -> None:
    """Gradients of experts are summed over the two ranks that have the same ones, all others over four."""
    experts: dict[str, Any] = {"parallel": {"expert": 2}}
    configs = [config_of(stage, accumulation, **experts) for stage, accumulation in ((1, 2), (3, 1))]
    for planned, found in ranks(4, of_all_experts, configs)[0]:
        assert planned == found and min(found.values()) > 0
