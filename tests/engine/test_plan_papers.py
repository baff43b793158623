"""What a plan counts is what papers print: a row for each number, with its source. Megatron and ZeRO: test_plan.py.

Bubbles and memory of pipelines are in tests/pipe/test_schedule_bubbles.py and tests/pipe/test_schedule_memory.py, the
first table of ZeRO in test_memory.py.
"""

from dataclasses import replace
from functools import cache

import pytest

from lowtide.engine.planning.choice import KEYS, Choice
from lowtide.engine.planning.llama import Shape, batch, build, runs_of
from lowtide.engine.planning.machine import Machine
from lowtide.engine.planning.planner import Planner

BASE = {"optimizer": {"type": "adamw", "params": {}}, "bf16": {"enabled": True}}
GIGA, TIB, GIB = 1e9, 2.0**40, 2.0**30
ONE = Machine(num_hosts=1, devices_per_host=1)


def planner_of(shape: Shape, machine: Machine) -> Planner:
    return Planner(build(shape), BASE, machine, runs_of(shape), batch(shape))


# -- ZeRO-Offload, arXiv 2101.06840 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 16])
def test_offloaded_states_are_those_of_the_zero_offload_paper(ranks: int) -> None:
    """Section 4: 2 bytes a parameter stay, 12 are on the host, divided over the ranks; and the sum of the gradients.

    That is 2 bytes a parameter there and 4 here, where sums are in 32 bits.
    """
    shape = Shape(layers=4, hidden=2048, heads=16, vocabulary=512, sequence=64)
    planner = planner_of(shape, replace(ONE, devices_per_host=ranks))
    numel = sum(param.numel() for param in build(shape).parameters())
    found = planner.estimate(Choice(stage=2, offload_optimizer="cpu"))
    assert found.bytes["parameter_bytes"] == pytest.approx(2 * numel, rel=0.01)
    assert found.bytes["optimizer_bytes"] == 0
    assert found.host_bytes == pytest.approx((12 + 4) * numel / ranks, rel=0.02)


def test_what_a_device_of_32_gb_trains_is_that_of_the_zero_offload_paper() -> None:
    """Section 6.2.1 and table 3: 13 billion parameters, 65 layers of 4096, where 1.4 billion were the most without."""
    v100 = replace(ONE, device_bytes=32 * GIGA, reserved_bytes=1.5 * GIGA)
    planner = planner_of(Shape(layers=65, hidden=4096, heads=32, vocabulary=50304, sequence=1024), v100)
    offloaded = Choice(stage=2, offload_optimizer="cpu", rows=1, every=1)
    assert not planner.estimate(offloaded).missing(v100)
    assert planner.estimate(replace(offloaded, offload_optimizer="none")).missing(v100)["device memory"] > 150 * GIGA


# -- ZeRO-Infinity, arXiv 2104.07857, figure 2a -----------------------------------------------------------------------

INFINITY = [  # (layers, hidden, heads, TiB of model states, of checkpoints at 32 samples, GiB of working memory)
    (80, 10240, 128, 1.83, 0.05, None),
    (100, 20480, 160, 9.16, 0.12, 6.25),
    (128, 25600, 256, 18.31, 0.20, 9.77),
    (195, 65536, 512, 182.81, 0.76, 64.0),
    (315, 163840, 1024, 1845.70, 3.08, 400.0),
]


@cache
def infinity(layers: int, hidden: int, heads: int) -> Planner:
    return planner_of(Shape(layers, hidden, heads, vocabulary=256, sequence=1024), ONE)


@pytest.mark.parametrize(("layers", "hidden", "heads", "states", "checkpoints", "working"), INFINITY)
def test_bytes_are_those_of_the_zero_infinity_paper(
    layers: int, hidden: int, heads: int, states: float, checkpoints: float, working: float | None
) -> None:
    """Sections 3 and 5: states have 20 bytes a parameter, 2 of them a gradient in 16 bits beside that in 32.

    Checkpoints are 2 bytes x samples x tokens x hidden of each layer. Working memory, 16 x hidden^2, is of the largest
    matrix and its gradient in 16 bits, in tiles of which they gather it; here a block is gathered whole, 12
    hidden^2 parameters of 2 bytes, more by half: what splits a matrix over devices is not built.
    """
    planner = infinity(layers, hidden, heads)
    found = planner.estimate(Choice(every=1)).bytes
    total = sum(found[kind] for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
    assert total / TIB * 20 / 18 == pytest.approx(states, rel=0.01)
    kept = planner.profile(1, 1).part("layers.1").kept_bytes
    assert kept * 32 * layers / TIB == pytest.approx(checkpoints, abs=0.006)
    groups = planner._first.places[0].units[1][1]
    assert sum(one.full_bytes for one in groups) == pytest.approx(24 * hidden**2, rel=0.01)
    if working is not None:
        assert 16 * hidden**2 / GIB == pytest.approx(working, rel=0.002)


@pytest.mark.parametrize(
    ("what", "share", "bandwidth", "efficiency"),
    [
        ("parameters and gradients, 1 sample", 1.0, 70 * GIGA, 0.5),
        ("states, 2 samples", 2 / 4, 1500 * GIGA, 0.91),
    ],
)
def test_bandwidth_that_is_needed_is_that_of_the_zero_infinity_paper(
    what: str, share: float, bandwidth: float, efficiency: float
) -> None:
    """Section 4: samples x 1024 tokens operations for a byte that moves; then efficiency at 70 TFLOPs a device.

    8 bytes a parameter and step of parameters and gradients, and 4 times that of states, beside 8 operations for each
    token with what is computed again. A profile has 5 % less: the last product of a block is not computed again.
    """
    planner = infinity(80, 10240, 128)
    numel = sum(param.numel() for param in build(Shape(80, 10240, 128, 256, 1024)).parameters())
    counted = planner.profile(1, 1).flops / (8 * numel)
    assert 0.94 * 1024 < counted <= 1024
    moved = share * counted * bandwidth
    assert moved / (moved + 70e12) == pytest.approx(efficiency, abs=0.01), what


def test_bandwidth_that_checkpoints_need_is_that_of_the_zero_infinity_paper() -> None:
    """Section 4: 24 x hidden operations for each byte of a checkpoint; 2 GB/s do for half at a hidden of 2048."""
    planner = planner_of(Shape(layers=4, hidden=2048, heads=16, vocabulary=256, sequence=1024), ONE)
    part = planner.profile(1, 1).part("layers.1")
    # Out and in again. Attention comes on top: 4 x tokens of 24 x hidden.
    intensity = (part.forward_flops + part.backward_flops) / (2 * part.kept_bytes)
    assert intensity == pytest.approx(24 * 2048, rel=0.2) and intensity > 24 * 2048 * 0.97
    assert intensity * 2 * GIGA / (intensity * 2 * GIGA + 70e12) > 0.5


# -- Llama 3, arXiv 2407.21783 ----------------------------------------------------------------------------------------

LLAMA_405B = Shape(126, 16384, 128, 128256, 8192, kv_heads=8, mlp=53248)


def test_the_layout_of_llama_405b_waits_for_tensor_parallelism() -> None:
    """Table 4: 16,384 devices of 80 GB are pipeline 16 x tensor 8 x data 128, of 2,048 samples of 8,192 tokens a step.

    Without a tensor axis its 8 are data-parallel: that is counted, and does not fit. With 16 microbatches in flight, as
    128 data-parallel ranks have, an eighth of it would, if layers are computed again. Their plan does without: here the
    eighth does not fit then, since the operations of a plan are not fused. When "tensor" is among KEYS, this test is to
    plan the published layout.
    """
    assert "tensor" not in KEYS
    machine = Machine(num_hosts=2048)
    planner = planner_of(LLAMA_405B, machine)
    numel = sum(param.numel() for param in build(LLAMA_405B).parameters())
    assert numel == pytest.approx(405.85e9, rel=0.001)
    choice = Choice(pipeline=16, schedule="1f1b", stage=1, rows=1, accumulation=2, every=1)
    found = planner.estimate(choice)
    assert found.num_samples == 2048
    assert found.bytes["parameter_bytes"] == pytest.approx(2 * numel / 16, rel=0.01)
    assert found.bytes["optimizer_bytes"] == pytest.approx(12 * numel / 16 / 1024, rel=0.01)
    assert found.missing(machine)["device memory"] > 100 * GIGA
    for every, fits in ((1, True), (0, False)):
        filled = planner.estimate(replace(choice, accumulation=16, every=every))
        assert (filled.peak_bytes / 8 < machine.usable_bytes) == fits
