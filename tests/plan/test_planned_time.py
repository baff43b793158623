"""Planned time: what of a step's collectives waits for what."""

import re
from functools import partial
from typing import Any

import pytest
import torch

from lowtide.comm import ParallelDims
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import Footprint
from lowtide.engine.config.config import Config
from lowtide.engine.plan.choice import Choice
from lowtide.engine.plan.estimate import Estimate, MachineWork, estimate, update_seconds
from lowtide.engine.plan.host_timeline import UnitWork, host_timeline
from lowtide.engine.plan.layered import LayeredParts
from lowtide.engine.plan.llama import Shape, batch, build, short_profiler
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.planner import Planner
from lowtide.engine.plan.stages import Stages
from lowtide.engine.plan.step_order import SimulatedTimeline
from tests.kit import models
from tests.kit.training import ADAMW
from tests.pretend.host_order import check_order


def test_a_collective_waits_for_the_queue_and_for_what_was_launched_before_it() -> None:
    line = SimulatedTimeline()
    first, second = line.start("gather", 3.0), line.start("reduce", 2.0)
    line.compute(4.0)
    third = line.start("gather", 2.0)
    line.wait("gather", first)
    assert (line.now, line.exposed_seconds) == (4.0, 0.0)
    line.wait("gather", third)
    assert (first, second, third) == (3, 5, 7)
    assert line.now == 7.0 and line.exposed == {"gather": 3.0} and line.hidden_seconds == 4.0


@pytest.mark.parametrize(
    ("names", "on_host"),
    [(("shard",), 4), (("secondary",), 2), (("replica",), 1), (("secondary", "shard"), 8), (("pipe",), 1)],
)
def test_ranks_of_an_axis_share_hosts_as_they_follow_each_other(names: tuple[str, ...], on_host: int) -> None:
    sizes = (("pipe", 2), ("replica", 2), ("secondary", 4), ("shard", 4))
    assert Machine(num_hosts=8).ranks_on_host(ParallelDims(sizes, ("replica", "secondary", "shard")), names) == on_host


@pytest.mark.parametrize(("size", "on_host"), [(3, 1), (4, 4), (6, 2), (12, 4), (24, 8)])
def test_of_groups_that_hosts_do_not_divide_the_fewest_of_a_host_count(size: int, on_host: int) -> None:
    """Three hosts of 8: the second group of 12 ranks begins with 4 of a host, as the first ends."""
    dims = ParallelDims((("replica", 24 // size), ("secondary", 1), ("shard", size)), ("replica", "shard"))
    machine = Machine(num_hosts=3)
    assert machine.ranks_on_host(dims, ("shard",)) == on_host and machine.ranks_on_host(dims, dims.data) == 8


def test_a_ring_over_hosts_is_as_fast_as_the_links_that_leave_them() -> None:
    machine = Machine(num_hosts=2, intra=8.0, inter=1.0, intra_latency=0.0, inter_latency=0.0)
    assert machine.collective(64.0, 8, on_host=8) == 7.0, "inside: 7/8 of it"
    assert machine.collective(64.0, 16, on_host=8) == 7.5, "15/16 inside; outside half of it over 8 links takes 4"
    assert machine.collective(64.0, 2, on_host=1) == 32.0 and machine.collective(64.0, 1, on_host=1) == 0.0
    machine = Machine(num_hosts=2, intra=8.0, inter=0.125, intra_latency=0.0, inter_latency=0.0)
    assert machine.collective(64.0, 12, on_host=8) == 32.0, "a host and a half: half of it leaves over 8 links"


def test_a_machine_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("flops: expected more than 0, found 0")):
        Machine(flops=0)
    with pytest.raises(ValueError, match=re.escape("host_bytes: expected at least 0, found -1")):
        Machine(host_bytes=-1)


@pytest.mark.parametrize("is_layered", [False, True])
def test_what_is_not_waited_for_goes_on_beside_what_computes(is_layered: bool) -> None:
    zero = {"stage": 3, "layered_gradient_accumulation": is_layered}
    config = {"gradient_accumulation_steps": 2, "zero_optimization": zero, "optimizer": ADAMW}
    with torch.device("meta"):
        model = models.tiny_gpt()
    blueprint = Blueprint.of(Config.load(config).resolve(2), model, 2, device="cuda")
    profile = MetaRun(model, blueprint.units, blueprint.dtypes, "cuda").profile(models.token_batch(0, 1), 1, 0)

    def at(flops: float) -> Estimate:
        machine = Machine(devices_per_host=2, flops=flops)
        if not is_layered:
            return estimate(blueprint, machine, profile)
        parts = LayeredParts(blueprint, machine)
        return parts.estimate(blueprint.config, Stages(parts.split, profile, MachineWork(profile, machine)))

    slow, fast = at(1e8), at(1e15)
    waited = [sum(one.seconds[f"{kind} exposed"] for kind in ("gather", "reduce")) for one in (slow, fast)]
    hidden = [one.hidden["collectives"] for one in (slow, fast)]
    assert waited[0] < waited[1] and hidden[0] > hidden[1]
    assert waited[0] + hidden[0] == pytest.approx(waited[1] + hidden[1])


def test_little_of_a_large_models_collectives_is_exposed() -> None:
    """Llama 8B on 8 devices, 8192 tokens each: the order of the calls hides all but the first and the last ones."""
    shape = Shape(32, 4096, 32, 128256, 8192, kv_heads=8, mlp=14336)

    def exposed_share(**zero: object) -> float:
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": ADAMW}
        loaded = Config.load({**config, "zero_optimization": {"stage": 3, **zero}})
        planner = Planner(build(shape), loaded.as_dict(), Machine(), partial(short_profiler, shape), batch(shape))
        found = planner.estimate(Choice.of(loaded.resolve(8)))
        return sum(found.seconds[f"{kind} exposed"] for kind in ("gather", "reduce")) / found.step_seconds

    assert exposed_share() < 0.02 < 0.12 < exposed_share(stage3_prefetch_bucket_size=0)


# -- updates on the host ----------------------------------------------------------------------------------------------


def share_of_speed(num_tokens: int, update_bytes: int, gradient_bytes: int = 4, **how: bool) -> float:
    """Tokens/s of 4B parameters whose states are on the host, beside those without offload: an H100 and its host."""
    numel, num_units, link, host = 4e9, 37, 50e9, 100e9
    compute = 0.447 * num_tokens / 8192
    each = numel / num_units
    unit = UnitWork(
        "",
        compute / 3 / num_units,
        2 * compute / 3 / num_units,
        each * gradient_bytes / link,
        each * update_bytes / host,
        each * 2 / link,
    )
    units = [unit._replace(name=str(number)) for number in range(num_units)]
    return compute / (compute + host_timeline(units, **how)[1])


def test_the_forward_hides_updates_on_the_host_if_a_step_is_long() -> None:
    assert share_of_speed(8192, 30) < 0.3 and share_of_speed(8192, 12, 2) > 0.55
    assert share_of_speed(65536, 30) > 0.95 and share_of_speed(65536, 30, by_unit=False) < 0.8
    assert share_of_speed(8192, 12, 2, speculative=True) > share_of_speed(8192, 12, 2)


@pytest.mark.parametrize("speculative", [False, True])
def test_the_simulated_update_has_the_order_of_the_device(speculative: bool) -> None:
    names = [f"blocks.{number}" for number in range(4)]
    events, _ = host_timeline([UnitWork(name, 1.0, 2.0, 0.25, 0.5, 0.25) for name in names], speculative)
    check_order([(what, name) for _, what, name in events], names, speculative)


_SMALL: dict[str, Any] = {
    "bf16": {"enabled": True, "masters": "int8"},
    "optimizer": {"type": "adamw", "params": {"state_dtype": "int8"}},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bf16": {"enabled": True}, "optimizer": ADAMW}, 30),
        (_SMALL, 14),
        ({**_SMALL, "data_types": {"grad_accum_dtype": "bf16"}}, 12),
    ],
)
def test_the_host_moves_these_bytes_a_parameter(config: dict[str, Any], expected: int) -> None:
    """Masters and two states read and written, the gradient read, the parameter written, or read too."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    with torch.device("meta"):
        model = models.tiny_gpt()
    asked = Config.load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **config})
    blueprint = Blueprint.of(asked.resolve(1), model, 1, device="cuda")
    footprint, groups = Footprint(blueprint, 0), blueprint.places[0].updated
    numel = sum(group.layout.shard_numel for group in groups)
    assert expected <= sum(map(footprint.host_update_bytes, groups)) / numel < expected + 0.1
    machine = Machine(devices_per_host=1, host_memory=1e11, link=5e10)
    copies = sum((one.accumulation_dtype.itemsize + one.dtype.itemsize) * one.layout.shard_numel for one in groups)
    on_host = numel * expected / machine.host_memory + copies / machine.link
    assert update_seconds(blueprint, machine, 0) == pytest.approx(on_host, rel=0.01)
