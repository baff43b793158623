"""What an engine takes of a device is what its blueprint says, to the byte, and what is named here."""

import gc
import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.footprint import Moment, bytes_of
from tests import models
from tests.engine.test_blueprint import BF16, FP32, config_of
from tests.engine.test_blueprint import frozen_gpt as gpt
from tests.pretend.group import register
from tests.ranks import RankPool

STEPS = 2  # in the second one, states are there
HOST = {"device": "cpu"}
Found = dict[str, tuple[int, int, int]]  # bytes said, that there are, and how many more there may be


def chain() -> nn.Module:
    """Gradients of a block are more than its activations."""
    return models.linear_chain(64, 6)


def allocated() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def collected() -> int:
    gc.collect(), gc.collect()  # an engine has cycles; some go through nodes of the graph
    return allocated()


def blueprint_of(build: Any, config: dict[str, Any], num_ranks: int) -> Blueprint:
    with torch.device("meta"):
        model = build()
    return Blueprint.of(Config.load(config).resolve(num_ranks), model, num_ranks, device="pretend")


def said_of(blueprint: Blueprint, rank: int, moment: Moment) -> int:
    said = bytes_of(blueprint, rank, moment)
    return said.parameters + said.gradients + said.optimizer


def small_bytes(blueprint: Blueprint, moment: Moment) -> int:
    """The most that there is beside model states, of which all but the last term is 0.3 % of a model at most."""
    plan = blueprint.places[0]
    stand_ins = sum(group.dtype.itemsize for group in plan.groups)  # a NaN for parameters that were released
    # Up to 6 elements of each, to tell a change by `.data`: as they are, and what this step and the last one have seen.
    guard = 4 * 6 * sum(len(one.params) * one.dtype.itemsize for one in plan.groups)
    if moment is Moment.BETWEEN_STEPS:
        return stand_ins + guard
    blocks = sum(group.layout.padded_numel // 1024 for group in plan.trained)
    return stand_ins + guard + 8 * blocks + 2 * len(plan.trained)  # squares by block, and whether all is finite


def on_its_way(blueprint: Blueprint) -> int:
    """A message of gradients and its sum, beside the gradients of the unit that are there."""
    trained = blueprint.places[0].trained
    sums = [group.layout.shard_numel * group.accumulation_dtype.itemsize for group in trained]
    messages = [group.layout.padded_numel * group.reduce_dtype.itemsize for group in trained]
    sends = blueprint.arrangement.num_ranks > 1
    return max(messages) * sends + max(sums) * (sends or blueprint.homes.updates_on_host)


def activations(model: nn.Module, batch: tuple[Tensor, ...], dtype: torch.dtype) -> int:
    """The most that plain torch has beside parameters in a forward and backward whose gradients are dropped."""
    model, own = model.to("pretend", dtype), [one.to("pretend") for one in batch]
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    model(*own).backward()
    return torch.accelerator.max_memory_allocated() - before


def train(build: Any, batches: list[tuple[Tensor, ...]], config: dict[str, Any], rank: int, num_ranks: int) -> Found:
    """What there is at each moment, and the most in a step, beside what its blueprint says."""
    register()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    working = activations(build(), batches[0], dtype) + sum(one.nbytes for one in batches[0])
    blueprint = blueprint_of(build, config, num_ranks)
    before = collected()
    engine = lowtide.initialize(build(), {**config, "kernels": {"fuse_modules": False}})
    found: Found = {}

    def look(moment: Moment) -> None:
        there, said = allocated() - before, said_of(blueprint, rank, moment)
        leaving = bytes_of(blueprint, rank).staging * (moment is not Moment.BETWEEN_STEPS)
        found[moment.value] = said, there, small_bytes(blueprint, moment) + leaving

    for _ in range(STEPS):
        peak = 0
        for number, batch in enumerate(batches, 1):
            torch.accelerator.reset_peak_memory_stats()
            engine.backward(engine(*batch))
            peak = max(peak, torch.accelerator.max_memory_allocated() - before)
            look(Moment.REDUCED if number == len(batches) else Moment.ACCUMULATING)
            engine.step()
        look(Moment.BETWEEN_STEPS)
    moments = list(Moment) if len(batches) > 1 else [Moment.BETWEEN_STEPS, Moment.REDUCED]
    most = max(bytes_of(blueprint, rank, moment).model for moment in moments)
    small = small_bytes(blueprint, Moment.REDUCED)
    found["the most"] = most, peak, working + on_its_way(blueprint) + small
    engine.close()
    del engine
    found["after it"] = before, collected(), 0
    return found


def train_all(cases: list[tuple[str, int, dict[str, Any], int, str]]) -> list[str]:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wrong = []
    for case in cases:
        name, stage, dtypes, accumulation, offload = case
        build, batch = MODELS[name]
        sections = dict.fromkeys(offload.split(), HOST)
        config = config_of(stage, accumulation, "auto", zero=sections, **dtypes)
        found = train(build, [batch(step, 2) for step in range(accumulation)], config, rank, num_ranks)
        for what, (said, there, more) in found.items():
            if not said <= there <= said + more and not (what == "the most" and there <= said + more):
                wrong.append(f"rank {rank}, {case}, {what}: said {said}, there are {there}, {said + more} at most")
    return wrong


MODELS: dict[str, Any] = {
    "gpt": (gpt, models.token_batch),
    "chain": (chain, lambda step, rows: (torch.randn(rows, 64),)),
}
OFFLOADS = ["", "offload_optimizer", "offload_optimizer offload_param"]
GRID = [
    (name, stage, dtypes, accumulation, offload)
    for name, stage, dtypes, accumulation, offload in product(MODELS, range(4), (FP32, BF16), (1, 2), OFFLOADS)
    if (stage == 3 or "param" not in offload) and (name == "gpt" or not dtypes)
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_device_has_what_the_blueprint_says(pretend_ranks: RankPool, world_size: int) -> None:
    cases = GRID[:: 2 if world_size == 1 else 5]
    wrong = [text for texts in pretend_ranks(world_size, train_all, cases, process_group=False) for text in texts]
    assert not wrong, "\n".join(wrong)
