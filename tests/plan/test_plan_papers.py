"""What a plan counts is what papers print: a row for each number, with its source. Megatron and ZeRO: test_plan.py.

Bubbles and memory of pipelines are in tests/pipe/test_schedule_formulas.py, the first table of ZeRO in test_memory.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from lowtide.engine.plan.choice import Choice
from lowtide.engine.plan.llama import Shape, batch, build, short_profiler
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.planner import Planner
from lowtide.engine.plan.profile import ProfilePart
from lowtide.engine.plan.splits import PlannedSplits
from lowtide.zero.plan import Dtypes, plan_units
from tests.kit.models import Chain

BASE = {"optimizer": {"type": "adamw", "params": {}}, "bf16": {"enabled": True}}
GIGA, TIB, GIB = 1e9, 2.0**40, 2.0**30
ONE = Machine(num_hosts=1, devices_per_host=1)


def planner_of(shape: Shape, machine: Machine) -> Planner:
    return Planner(build(shape), BASE, machine, partial(short_profiler, shape), batch(shape))


# -- Megatron, arXiv 2205.05198 ---------------------------------------------------------------------------------------


class MegatronAttention(nn.Module):
    """Its core: products and a softmax, of which all is kept; or one kernel, which computes it again."""

    def __init__(self, h: int, heads: int, is_recomputed: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.is_recomputed = heads, h // heads, is_recomputed
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(h, h) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (b, s, h)
        b, s, _ = x.shape
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2) for one in layers)
        if self.is_recomputed:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-1, -2) * self.head_dim**-0.5).softmax(-1) @ v
        y: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(b, s, -1))
        return y


class MegatronMlp(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(nn.functional.gelu(self.up_proj(x)))
        return y


class MegatronLayer(nn.Module):
    """Of figure 3, without dropout."""

    def __init__(self, h: int, heads: int, is_recomputed: bool) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attention, self.mlp = MegatronAttention(h, heads, is_recomputed), MegatronMlp(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


MEGATRON = 256, 2, 512, 8  # tokens, samples, hidden size, heads


def megatron_layer(is_recomputed: bool, splits: PlannedSplits) -> ProfilePart:
    """Of three layers the one in the middle."""
    s, b, h, a = MEGATRON
    model = Chain(*(MegatronLayer(h, a, is_recomputed) for _ in range(3)))
    run = MetaRun(model, plan_units(model), Dtypes(torch.bfloat16, None, None), "cuda", splits=splits)
    return run.profile((torch.zeros(b, s, h),), b, 0).part("blocks.1")


def core_of(is_recomputed: bool) -> float:
    """Of 5 a s / h, what is not of dropout."""
    s, _, h, a = MEGATRON
    return 0 if is_recomputed else 2 * a * s / h


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_activations_of_split_layers_are_those_of_the_megatron_paper(t: int, is_recomputed: bool) -> None:
    """Equation 2: sbh (10 + 24 / t + 5 a s / (h t)) bytes of a layer; with selective recomputation the last is gone.

    Without dropout, whose masks are 1 byte of an element: 2 of the 10, and 3 of the 5.
    """
    s, b, h, _ = MEGATRON
    part = megatron_layer(is_recomputed, PlannedSplits(tensor=t))
    assert part.kept_bytes == pytest.approx(s * b * h * (8 + 24 / t + core_of(is_recomputed) / t), rel=0.04)
    # Section 4.2.1: two all-reduces forward, of activations in 16 bits, and two backward.
    sums = [call.nbytes for call in part.exchanges]
    assert sums == ([] if t == 1 else [2 * s * b * h] * 4)


@pytest.mark.parametrize("t", [2, 8])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_activations_of_token_parts_are_those_of_the_megatron_paper(t: int, is_recomputed: bool) -> None:
    """Equation 4: sbh / t (34 + 5 a s / h); with selective recomputation, equation 6, 34 sbh / t. Without dropout.

    Two inputs of columns, 4 sbh, are kept whole here: the paper gathers them again in the backward (section 4.2.2).
    """
    s, b, h, _ = MEGATRON
    part = megatron_layer(is_recomputed, PlannedSplits(tensor=t, has_parts=True))
    paper = s * b * h / t * (32 + core_of(is_recomputed))
    assert part.kept_bytes == pytest.approx(paper + 4 * s * b * h * (1 - 1 / t), rel=0.04)
    # Figure 6: in the place of each all-reduce a gather and a reduce-scatter, which move as much.
    moved = [(call.kind, call.nbytes) for call in part.exchanges if call.nbytes == 2 * s * b * h]
    assert sorted(moved) == [("gather", 2 * s * b * h)] * 4 + [("sum_part", 2 * s * b * h)] * 4


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
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "states", "checkpoints", "working"), INFINITY)
def test_bytes_and_operations_are_those_of_the_zero_infinity_paper(
    layers: int, hidden: int, heads: int, states: float, checkpoints: float, working: float | None
) -> None:
    """Sections 3 and 5: states have 20 bytes a parameter, 2 of them a gradient in 16 bits beside that in 32.

    Checkpoints are 2 bytes x samples x tokens x hidden of each layer. Working memory, 16 x hidden^2, is of the largest
    matrix and its gradient in 16 bits, in tiles of which they gather it; here a block is gathered whole, 12
    hidden^2 parameters of 2 bytes, more by half: what splits a matrix over devices is not built. Section 4: 8
    operations a parameter and token, with what is computed again; but the last product of a block is not, 5 % less.
    """
    shape = Shape(layers, hidden, heads, vocabulary=256, sequence=1024)
    planner = planner_of(shape, ONE)
    found = planner.estimate(Choice(every=1)).bytes
    total = sum(found[kind] for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
    assert total / TIB * 20 / 18 == pytest.approx(states, rel=0.01)
    profile = planner.profile(1, 1)
    assert profile.part("layers.1").kept_bytes * 32 * layers / TIB == pytest.approx(checkpoints, abs=0.006)
    groups = planner._first.places[0].units[1][1]
    assert sum(one.full_bytes for one in groups) == pytest.approx(24 * hidden**2, rel=0.01)
    assert working is None or 16 * hidden**2 / GIB == pytest.approx(working, rel=0.002)
    numel = sum(param.numel() for param in build(shape).parameters())
    assert 0.94 * 1024 < profile.flops / (8 * numel) <= 1024


# -- Llama 3, arXiv 2407.21783 ----------------------------------------------------------------------------------------

LLAMA_405B = Shape(126, 16384, 128, 128256, 8192, kv_heads=8, mlp=53248)


def test_the_layout_of_llama_405b_fits_and_is_near_the_front() -> None:
    """Table 4: 16,384 devices of 80 GB are pipeline 16 x tensor 8 x data 128, of 2,048 samples of 8,192 tokens a step.

    Stages are interleaved, as theirs; layers are computed again, as theirs are not: without, the operations of a plan,
    which are not fused, do not fit. Stage 3 with tensor 8 and no pipeline is faster, if 45 GB/s are reached between
    2,048 ranks; the fastest of all, by a search of 42 s, takes 9.1 s: tensor 2 x sequence 4, activations on the host.
    """
    machine = Machine(num_hosts=2048)
    planner = planner_of(LLAMA_405B, machine)
    numel = sum(param.numel() for param in build(LLAMA_405B).parameters())
    assert numel == pytest.approx(405.85e9, rel=0.001)
    published = Choice(
        pipeline=16, tensor=8, schedule="interleaved", chunks=4, stage=1, rows=1, accumulation=16, every=1
    )
    found = planner.estimate(published)
    assert found.num_samples == 2048 and not found.missing(machine)
    # Norms are on all ranks; the first and last of 16 places have the embedding and the head.
    assert found.bytes["parameter_bytes"] == pytest.approx(2 * numel / 16 / 8, rel=0.02)
    assert found.bytes["optimizer_bytes"] == pytest.approx(12 * numel / 16 / 8 / 128, rel=0.02)
    assert planner.estimate(replace(published, every=0)).missing(machine)
    assert planner.estimate(replace(published, tensor=1, accumulation=2)).missing(machine)
    fastest = planner.estimate(Choice(tensor=8, stage=3, rows=1, accumulation=1, every=1))
    assert not fastest.missing(machine) and found.step_seconds < 1.35 * fastest.step_seconds < 2 * 9.1
