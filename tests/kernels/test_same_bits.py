"""What the C++ optimizer step does to an element does not depend on where it lies, on threads, or on the processor."""

import platform
from collections.abc import Iterator

import pytest
import torch

from lowtide.kernels.optimizer_step import CpuKernel
from tests.kernels.cpu_kernel import CASES, STATE_DTYPES, Shard, assert_same_bits, needs_compiler, start_values
from tests.kit.grids import pairs

pytestmark = needs_compiler

NUMEL = 100_003  # several tasks of threads, and a rest that is no vector
OUT = torch.bfloat16
IS_X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(
    kernel: CpuKernel,
    name: str,
    state_dtype: torch.dtype,
    numel: int = NUMEL,
    offset: int = 0,
    cuts: tuple[int, ...] = (),
) -> Shard:
    weight, gradients = start_values(numel)
    shard = Shard(*CASES[name], weight, state_dtype, OUT, offset)
    for step, gradient in enumerate(gradients, start=1):
        shard.update(kernel, shard.moved(gradient.bfloat16()), step, scale=1 / 3, cuts=cuts)
    return shard


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_where_a_shard_is_cut(kernel: CpuKernel, name: str, state_dtype: torch.dtype) -> None:
    whole = trained(kernel, name, state_dtype)
    assert_same_bits(trained(kernel, name, state_dtype, cuts=(1024, 5 * 1024, 64 * 1024, 97 * 1024)), whole)
    if state_dtype != torch.int8:
        assert_same_bits(trained(kernel, name, state_dtype, cuts=(1, 20, 1031, 40_007, NUMEL - 1)), whole)


@pytest.mark.parametrize(("name", "state_dtype", "offset"), pairs(list(CASES), STATE_DTYPES, (1, 3, 8)), ids=str)
def test_addresses(kernel: CpuKernel, name: str, state_dtype: torch.dtype, offset: int) -> None:
    moved, whole = trained(kernel, name, state_dtype, 5000, offset), trained(kernel, name, state_dtype, 5000)
    assert_same_bits(moved, whole)


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_the_number_of_threads(kernel: CpuKernel, name: str, state_dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    alone = trained(kernel, name, state_dtype)
    torch.set_num_threads(3)
    assert_same_bits(trained(kernel, name, state_dtype), alone)


@pytest.mark.skipif(not IS_X86, reason="the flags are those of x86")
@pytest.mark.parametrize("flags", [(), ("-mavx2",), ("-march=native", "-mno-avx512f")])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_the_instructions_that_are_used(kernel: CpuKernel, flags: tuple[str, ...], state_dtype: torch.dtype) -> None:
    other = CpuKernel(flags)
    for name in CASES:
        assert_same_bits(trained(other, name, state_dtype, 3003), trained(kernel, name, state_dtype, 3003))


@pytest.mark.skipif(not IS_X86, reason="the flags are those of x86")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_casts_with_any_instructions(kernel: CpuKernel, out_dtype: torch.dtype) -> None:
    """Weights and gradients over the whole range of float16, below its normal numbers and beyond it."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (torch.rand(20_000, generator=generator) * 14 - 9)
    weight, gradient = (torch.randn(20_000, generator=generator) * size for _ in range(2))
    shards = []
    for used in (kernel, CpuKernel(()), CpuKernel(("-mavx2",))):
        shard = Shard(*CASES["sgd"], weight, out_dtype=out_dtype)
        shard.update(used, gradient.clamp(-65504, 65504).half(), 1)
        shards.append(shard)
    for shard in shards[1:]:
        assert_same_bits(shard, shards[0])


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
