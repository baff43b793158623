"""Messages of quantized blocks: within their bound, right in the mean, the same bits from every tier."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.quantized_blocks import CpuBlocks, dequantize, quantize, quantized_bytes
from lowtide.kernels.weight_rounding import Rounding
from tests.kernels.cpu_kernel import needs_compiler

BITS = (4, 8)
NUM_BLOCKS = 19
NUMEL = 128 * NUM_BLOCKS
DRAWN = Rounding(3, 2**32 - 500)  # the upper word of the numbers changes on the way
MOST = {4: 7, 8: 127}


def special(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Blocks of all kinds: with values that are not finite, of zeros, of very small ones, with exact ties."""
    values = torch.randn(NUMEL, generator=generator).to(dtype)
    values[5], values[128 * 12 + 3] = torch.inf, torch.nan
    values[128 * 7 : 128 * 8] = 0
    values[128 * 9 : 128 * 10] *= 2.0**-140 if dtype != torch.float16 else 0
    values[128 * 10 : 128 * 11] = (torch.arange(128) - 64).to(dtype)
    values[128 * 11 : 128 * 12] *= 1e30 if dtype != torch.float16 else 1e3
    return values


def message_of(
    values: Tensor, bits: int, rounding: Rounding | None, step: int = 1, backend: Backend = "auto"
) -> Tensor:
    message = torch.zeros(quantized_bytes(values.numel(), bits), dtype=torch.uint8)
    quantize(values, bits, message, rounding=rounding, step=step, backend=backend)
    return message


def read(message: Tensor, bits: int, backend: Backend = "auto") -> Tensor:
    out = torch.empty(message.numel() // (16 * bits + 4) * 128)
    dequantize(message, bits, out, backend=backend)
    return out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rounding", [None, DRAWN], ids=["nearest", "drawn"])
def test_what_is_read_is_within_its_bound(bits: int, rounding: Rounding | None, generator: torch.Generator) -> None:
    values = torch.randn(NUMEL, generator=generator) * torch.randn(NUM_BLOCKS, generator=generator).repeat_interleave(
        128
    )
    scale = values.view(-1, 128).abs().amax(1, keepdim=True) / MOST[bits]
    error = (read(message_of(values, bits, rounding), bits) - values).abs().view(-1, 128) / scale
    assert error.max() <= (0.5 if rounding is None else 1.0) * (1 + 1e-5)
    assert error.max() > 0.4, "the bound is no tighter"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("over", ["elements", "steps"])
def test_what_is_drawn_is_right_in_the_mean(bits: int, over: str) -> None:
    """10,000 draws of one value, of which the largest of its block makes the scale; within 4.5 deviations."""
    block = torch.rand(128, generator=torch.Generator().manual_seed(bits))  # the same draws in each run
    block[0] = 1.0
    draws = 10_000
    if over == "elements":
        found = read(message_of(block.repeat(draws), bits, DRAWN), bits).view(draws, 128)
    else:
        messages = (message_of(block.repeat(4), bits, DRAWN, step) for step in range(draws // 4))
        found = torch.cat([read(message, bits) for message in messages]).view(draws, 128)
    part = (block * MOST[bits]).frac()
    deviation = (part * (1 - part) / draws).sqrt() / MOST[bits]
    error = (found.double().mean(0) - block).abs()
    assert bool((error <= 4.5 * deviation + 1e-6).all()), (error / deviation).max()


def test_an_element_of_4_bits_takes_at_most_27_hundredths_of_float16() -> None:
    assert quantized_bytes(NUMEL, 4) / (2 * NUMEL) < 0.27 and quantized_bytes(NUMEL, 8) / (2 * NUMEL) < 0.52


def test_messages_of_parts_are_those_of_the_whole(generator: torch.Generator) -> None:
    values, cut = torch.randn(NUMEL, generator=generator), 128 * 7
    whole = read(message_of(values, 4, DRAWN), 4)
    parts = [(values[:cut], DRAWN), (values[cut:], DRAWN.at(cut))]
    assert torch.equal(torch.cat([read(message_of(part, 4, rounding), 4) for part, rounding in parts]), whole)


@pytest.mark.parametrize("bits", BITS)
def test_values_that_are_not_finite_stay_so_where_they_are(bits: int, generator: torch.Generator) -> None:
    values = special(torch.float32, generator)
    found = read(message_of(values, bits, DRAWN), bits)
    assert torch.equal(~found.isfinite(), ~values.isfinite())
    assert not found[128 * 9 : 128 * 10].any(), "below 2^-100 all is zero"


NARROW = (torch.float16, torch.bfloat16)
FORMS: list[tuple[Backend, torch.dtype, int, Rounding | None]] = [
    *[("auto", dtype, bits, one) for dtype in (torch.float32, *NARROW) for bits in BITS for one in (None, DRAWN)],
    *[("triton", torch.float32, bits, DRAWN) for bits in BITS],
    *[("triton", dtype, bits, None) for dtype, bits in zip(NARROW, BITS, strict=True)],
]


@pytest.mark.parametrize(("backend", "dtype", "bits", "rounding"), FORMS, ids=str)
@needs_compiler
def test_all_tiers_write_and_read_the_same_bits(
    backend: Backend, dtype: torch.dtype, bits: int, rounding: Rounding | None, generator: torch.Generator
) -> None:
    values, less = special(dtype, generator), torch.randn(NUMEL, generator=generator).to(dtype)
    for minus in (None, less):
        messages = [torch.zeros(quantized_bytes(NUMEL, bits), dtype=torch.uint8) for _ in range(2)]
        for message, tier in zip(messages, (backend, "reference"), strict=True):
            quantize(values, bits, message, less=minus, rounding=rounding, step=4, backend=tier)
        assert torch.equal(*messages)
        for adds in (False, True):
            sums = [less.clone(), less.clone()]
            for total, tier in zip(sums, (backend, "reference"), strict=True):
                dequantize(messages[0], bits, total, adds=adds, backend=tier)
            assert torch.equal(*(total.float().nan_to_num_(77.0) for total in sums))


@needs_compiler
def test_portable_instructions_and_threads_change_no_bit(generator: torch.Generator) -> None:
    values = torch.randn(128 * 600, generator=generator)  # several tasks of a thread
    expected = message_of(values, 4, DRAWN, backend="reference")
    before = torch.get_num_threads()
    try:
        for flags, threads in (((), 1), ((), 3)):
            torch.set_num_threads(threads)
            message = torch.zeros_like(expected)
            CpuBlocks(flags).quantize(values, 4, message, None, DRAWN, 1)
            assert torch.equal(message, expected)
    finally:
        torch.set_num_threads(before)
