"""The C++ optimizer step: its casts, and that an element's bits depend on neither place, threads nor processor.

What it computes is asked with the other tiers, in test_optimizer_step.py.
"""

import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import CpuKernel, ShardUpdate
from tests.kernels.cpu_kernel import (
    CASES,
    SGD,
    STATE_DTYPES,
    Shard,
    assert_same_bits,
    in_turn,
    needs_compiler,
    start_values,
    trained,
)
from tests.kit.grids import pairs

pytestmark = needs_compiler

NUMEL = 100_003  # several tasks of threads, and a rest that is no vector
ONLY_X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flags are those of x86")
INSTRUCTIONS = [(), ("-mavx2",), ("-march=native", "-mno-avx512f")]


@pytest.fixture
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_round_to_nearest_even_as_torch(kernel: CpuKernel, dtype: torch.dtype) -> None:
    """Every value of the narrow dtype, the middles between neighbours and what lies beside them; NaN stays NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    middles = every.view(torch.int32) | {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}[dtype]
    values = torch.cat([every, *((middles + beside).view(torch.float32) for beside in (-1, 0, 1))])
    extremes = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -(2.0**-26), 3.4e38])
    values = torch.cat([values, extremes])
    values = values[values.isnan() | (values == 0) | (values.abs() >= 2.0**-126)]  # float32's denormals are zero here
    options = SGD | {"momentum": 0.0, "lr": 0.0, "weight_decay": 0.0}
    shard = Shard(CASES["sgd"][0], options, values, out_dtype=dtype)
    shard.update(kernel, torch.zeros_like(values), 1)
    assert shard.out is not None
    is_zero_times_infinity = values.isinf()  # w * decay: not a weight that training has
    same = (shard.out == values.to(dtype)) | (shard.out.isnan() & values.isnan()) | is_zero_times_infinity
    assert same.all(), values[~same][:5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_read_exactly_and_only_read(kernel: CpuKernel, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite() & ((every == 0) | (every.float().abs() > 2.0**-125))]
    before = every.clone()
    options = SGD | {"momentum": 0.0, "lr": 1.0, "weight_decay": 0.0}
    shard = Shard(CASES["sgd"][0], options, torch.zeros(every.numel()))
    shard.update(kernel, every, 1)
    assert torch.equal(shard.master, -every.float()) and torch.equal(every, before)


@ONLY_X86
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_casts_with_any_instructions(kernel: CpuKernel, out_dtype: torch.dtype) -> None:
    """Weights and gradients over the whole range of float16, below its normal numbers and beyond it."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (torch.rand(20_000, generator=generator) * 14 - 9)
    weight, gradient = (torch.randn(20_000, generator=generator) * size for _ in range(2))
    shards = []
    for used in (kernel, CpuKernel(()), CpuKernel(("-mavx2",))):
        shards.append(Shard(*CASES["sgd"], weight, out_dtype=out_dtype))
        shards[-1].update(used, gradient.clamp(-65504, 65504).half(), 1)
    for shard in shards[1:]:
        assert_same_bits(shard, shards[0])


# -- the same bits ---------------------------------------------------------------------------------------------------


def test_where_a_wide_shard_is_cut(kernel: CpuKernel) -> None:
    """At any place, as 8-bit states alone are stored in blocks."""
    for number, name in enumerate(CASES):
        whole = trained(kernel, name, STATE_DTYPES[number % 2], NUMEL, 2)
        cuts = (1, 20, 1031, 40_007, 64 * 1024, NUMEL - 1)
        assert_same_bits(trained(kernel, name, STATE_DTYPES[number % 2], NUMEL, 2, cuts=cuts), whole)


@pytest.mark.parametrize(("name", "state_dtype", "offset"), pairs(list(CASES), STATE_DTYPES, (1, 3, 8)), ids=str)
def test_addresses(kernel: CpuKernel, name: str, state_dtype: torch.dtype, offset: int) -> None:
    moved, whole = (trained(kernel, name, state_dtype, 5000, offset=one) for one in (offset, 0))
    assert_same_bits(moved, whole)


@pytest.mark.usefixtures("own_threads")
def test_the_number_of_threads(kernel: CpuKernel) -> None:
    for name, _, _, state_dtype in in_turn():
        torch.set_num_threads(1)
        alone = trained(kernel, name, state_dtype, NUMEL, 2)
        torch.set_num_threads(3)
        assert_same_bits(trained(kernel, name, state_dtype, NUMEL, 2), alone)


@ONLY_X86
@pytest.mark.parametrize("flags", INSTRUCTIONS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_the_instructions_that_are_used(kernel: CpuKernel, flags: tuple[str, ...], state_dtype: torch.dtype) -> None:
    other = CpuKernel(flags)
    for name in CASES:
        assert_same_bits(trained(other, name, state_dtype, 3003), trained(kernel, name, state_dtype, 3003))


def test_how_the_caller_treats_denormal_numbers(kernel: CpuKernel) -> None:
    """They are zero in every thread, also where the caller's own arithmetic keeps them; which is then as it was."""
    weight = torch.full((40_000,), 0.5)
    shards = []
    for flush in (False, True):
        shard = Shard(*CASES["sgd with momentum"], weight)
        shard.states["momentum_buffer"].fill_(1e-38)
        try:
            torch.set_flush_denormal(flush)
            shard.update(kernel, torch.zeros_like(weight), 2)  # 0.9e-38 is denormal
            kept = float(torch.tensor([1e-38]).mul(0.9))
        finally:
            torch.set_flush_denormal(False)
        assert (kept == 0.0) == flush
        shards.append(shard)
    assert_same_bits(shards[1], shards[0])
    shard = Shard(CASES["sgd with momentum"][0], CASES["sgd with momentum"][1] | {"weight_decay": 0.0}, weight)
    shard.states["momentum_buffer"].fill_(1e-38)
    shard.update(kernel, torch.zeros_like(weight), 2)
    assert not shard.states["momentum_buffer"].any()


# -- what it takes ---------------------------------------------------------------------------------------------------


def test_autograd_notices_that_weights_changed(kernel: CpuKernel) -> None:
    """A backward pass through values from before the step is refused, not wrong."""
    weight, (gradient, *_) = start_values(64)
    shard = Shard(*CASES["adamw"], weight, out_dtype=torch.bfloat16)
    assert shard.out is not None
    x = torch.ones(64, requires_grad=True)
    losses = [(x * shard.master).sum(), (x * shard.out).sum()]
    shard.update(kernel, gradient, 1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_it_does_not_serve_is_left_to_torch(kernel: CpuKernel) -> None:
    rule, options = CASES["adamw"]
    states = stored_states(list(new_states(rule, torch.zeros(8), options).values()))
    asked = ShardUpdate(torch.zeros(8), torch.zeros(8), states, [(8, options)], [1], None)
    changes: list[dict[str, Any]] = [
        {"master": torch.zeros(8, dtype=torch.float64)},
        {"gradient": torch.zeros(8, dtype=torch.float64)},
        {"gradient": torch.zeros(16)[::2]},
        {"out": torch.zeros(8, dtype=torch.float64)},
        {"master": torch.zeros(8, device="meta")},
        {"master": torch.zeros(8, dtype=torch.bfloat16)},
        {"remainder": torch.zeros(8, dtype=torch.bfloat16)},
    ]
    assert kernel.serves(rule, asked)
    assert not any(kernel.serves(rule, replace(asked, **change)) for change in changes)
    assert not kernel.serves(replace(rule, title="Mine"), asked)
    assert not kernel.serves(replace(rule, coefficients=None), asked)
