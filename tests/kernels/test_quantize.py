"""Block-wise quantization: bounds of its error, what its bits are, and that both forms give the same."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.quantize import dequantize, quantize, random_bits
from lowtide.kernels.quantized import NF4_FIXED, NF4_LEVELS, TOP_CODES, Format, Quantized
from tests.kernels.exact import DTYPES

FORMATS: tuple[Format, ...] = ("int8", "int4", "nf4")
WIDEST_STEP = {"int8": 1 / 127, "int4": 1 / 7, "nf4": 1 - 0.6961928009986877}  # of a block's largest magnitude
SHAPES = [(1,), (63,), (64,), (5, 123), (3, 2048), (2, 1, 4097)]
FLOAT32_ROUNDING = 2.0**-23


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers, of sizes that differ by blocks."""
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(2 * torch.randn(shape, generator=generator).clamp(-3, 3))).to(dtype)


def largest_of_blocks(x: Tensor, block_numel: int) -> Tensor:
    """The largest magnitude of each element's block, of the shape of x, float64."""
    flat = x.double().abs().reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % block_numel)).view(-1, block_numel)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: flat.numel()].view(x.shape)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_at_most_half_a_step(
    dtype: torch.dtype, format: Format, backend: Backend, generator: torch.Generator
) -> None:
    for shape, block_numel in zip(SHAPES, (64, 64, 128, 256, 1024, 2048), strict=True):
        x = drawn(shape, dtype, generator)
        found = dequantize(quantize(x, format, block_numel, backend=backend), backend=backend)
        largest = largest_of_blocks(x, block_numel)
        # A scale and its inverse are rounded, then a product each; nf4 also cuts off below 2^-23.
        bound = (WIDEST_STEP[format] / 2 + 4 * FLOAT32_ROUNDING) * largest
        assert found.shape == x.shape and found.dtype == torch.float32
        assert ((found.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("format", FORMATS)
def test_each_level_is_kept(format: Format) -> None:
    """What a code stands for becomes that code again."""
    levels = torch.tensor(NF4_LEVELS) if format == "nf4" else torch.arange(-TOP_CODES[format], TOP_CODES[format] + 1.0)
    for backend in ("triton", "reference"):
        values = 3 * levels.float().repeat(20)
        found = dequantize(quantize(values, format, 2048, backend=backend), backend=backend)
        torch.testing.assert_close(found, values, rtol=4 * FLOAT32_ROUNDING, atol=0)


@pytest.mark.parametrize("seed", [None, 0, 1, 2**31 + 5])
@pytest.mark.parametrize("format", FORMATS)
def test_both_forms_give_the_same_bits(format: Format, seed: int | None, generator: torch.Generator) -> None:
    for shape, block_numel, dtype in (((5, 123), 64, torch.float32), ((9001,), 512, torch.bfloat16)):
        x = drawn(shape, dtype, generator)
        ours, reference = (
            quantize(x, format, block_numel, seed=seed, backend=backend) for backend in ("triton", "reference")
        )
        assert torch.equal(ours.payload, reference.payload) and torch.equal(ours.scale, reference.scale)
        for out_dtype in (torch.float32, torch.float16):
            found, wanted = (dequantize(reference, out_dtype, backend=backend) for backend in ("triton", "reference"))
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_both_forms_round_ties_alike(format: Format, generator: torch.Generator) -> None:
    """Next to the middle of two codes, where the last bit of an inverse decides."""
    largest = torch.exp(torch.randn(40, 1, generator=generator))
    middles = ((torch.arange(127) % TOP_CODES[format] + 0.5) / TOP_CODES[format]).expand(40, -1)
    x = largest * torch.cat([torch.ones(40, 1), middles], dim=1)
    ours, reference = (quantize(x, format, 128, backend=backend) for backend in ("triton", "reference"))
    assert torch.equal(ours.payload, reference.payload) and torch.equal(ours.scale, reference.scale)


@pytest.mark.parametrize("seed", [None, 7])
def test_nf4_thresholds_are_those_of_the_reference(seed: int | None) -> None:
    """At, just below and just above each middle of two levels, and each level."""
    middles = [(low + high) // 2 for low, high in pairwise(NF4_FIXED)]
    fixed = torch.tensor([value + step for value in (*middles, *NF4_FIXED[1:-1]) for step in (-1, 0, 1)])
    x = torch.cat([torch.ones(1), fixed.float() * 2.0**-23])
    ours, reference = (quantize(x, "nf4", 128, seed=seed, backend=backend) for backend in ("triton", "reference"))
    assert torch.equal(ours.payload, reference.payload)


def test_two_codes_make_a_byte() -> None:
    x = torch.tensor([7.0, -7.0, 0.0, 3.0, -1.0])
    assert quantize(x, "int4", 64).payload.tolist() == [15 | 1 << 4, 8 | 11 << 4, 7 | 8 << 4]
    x = torch.tensor([1.0, -1.0, 0.0])
    assert quantize(x, "nf4", 64).payload.tolist() == [15 | 0 << 4, 7 | 7 << 4]
    assert quantize(127 * x, "int8", 64).payload.tolist() == [127, -127, 0]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("format", FORMATS)
def test_rounding_at_random_is_right_in_the_mean(format: Format, backend: Backend, generator: torch.Generator) -> None:
    """Each value many times: the mean of n is within 6 sigma, sigma = step / 2 / sqrt(n) at most."""
    count = 4096
    values = torch.cat([torch.ones(1), torch.rand(7, generator=generator) * 2 - 1])
    x = values.repeat(count)
    seed = int(torch.randint(2**32, (1,), generator=generator))
    found = dequantize(quantize(x, format, 2048, seed=seed, backend=backend), backend=backend).view(count, 8).double()
    step = WIDEST_STEP[format]
    assert ((found - values).abs() <= step + 4 * FLOAT32_ROUNDING).all()
    assert ((found.mean(0) - values).abs() <= 6 * step / 2 / count**0.5).all()
    assert (found.std(0)[1:] > 0).any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_part_has_the_codes_of_the_whole(backend: Backend, generator: torch.Generator) -> None:
    x = torch.randn(5000, generator=generator)
    for offset in (0, 2**32 - 700, 2**40 + 3):
        whole = quantize(x, "int8", 128, seed=3, offset=offset, backend=backend)
        part = quantize(x[1280:], "int8", 128, seed=3, offset=offset + 1280, backend=backend)
        assert torch.equal(part.payload, whole.payload[1280:])
    assert not torch.equal(quantize(x, "int8", 128, seed=4, backend=backend).payload, whole.payload)


def test_random_bits_are_even() -> None:
    """Every one of 32 bits is set in half of the elements, within 6 sigma, and they differ between seeds."""
    count = 1 << 14
    bits = random_bits(count, 11, 2**32 - 100, "cpu")
    ones = torch.stack([(bits >> index & 1).sum() for index in range(32)]).double()
    assert ((ones - count / 2).abs() <= 6 * (count / 4) ** 0.5).all()
    assert bits.unique().numel() > count - 20
    assert (bits == random_bits(count, 12, 2**32 - 100, "cpu")).sum() < 20
    assert torch.equal(bits, random_bits(count, 11 + 2**32, 2**32 - 100, "cpu"))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 2.0**126])
def test_a_block_with_a_value_out_of_range_reads_as_nan(bad: float, format: Format, backend: Backend) -> None:
    x = torch.ones(3 * 64)
    x[70] = bad
    quantized = quantize(x, format, 64, seed=1, backend=backend)
    found = dequantize(quantized, backend=backend)
    assert found[64:128].isnan().all() and quantized.scale.isnan().tolist() == [False, True, False]
    assert (found[:64] == 1).all() and (found[128:] == 1).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("format", FORMATS)
def test_tiny_and_zero_blocks(format: Format, backend: Backend) -> None:
    x = torch.zeros(4 * 64)
    x[64:128], x[130], x[200] = 1e-40, 1e-45, 2.0**125
    found = dequantize(quantize(x, format, 64, backend=backend), backend=backend)
    assert (found[:64] == 0).all()
    assert ((found - x).abs()[64:192] <= 2.0**-118 * WIDEST_STEP[format] / 2).all()
    assert abs(float(found[200]) / 2.0**125 - 1) <= 4 * FLOAT32_ROUNDING and (found[201:] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("format", FORMATS)
def test_values_are_added(format: Format, backend: Backend, generator: torch.Generator) -> None:
    x, start = torch.randn(2, 3, 300, generator=generator)
    quantized = quantize(x, format, backend=backend)
    values = dequantize(quantized, backend=backend)
    out = start.clone()
    assert dequantize(quantized, out=out, accumulate=True, backend=backend) is out
    exact = values.double() + start.double()
    assert ((out.double() - exact).abs() <= FLOAT32_ROUNDING * (exact.abs() + values.abs())).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("format", FORMATS)
def test_strides_are_followed_and_empty_tensors_stay_empty(
    format: Format, backend: Backend, generator: torch.Generator
) -> None:
    x = torch.randn(40, 30, generator=generator).t()
    across, copied = (quantize(one, format, 64, backend=backend) for one in (x, x.contiguous()))
    assert torch.equal(across.payload, copied.payload)
    empty = quantize(torch.empty(0, 3), format, backend=backend)
    assert empty.payload.numel() == 0 and dequantize(empty, backend=backend).shape == (0, 3)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_memory_is_reused(backend: Backend, generator: torch.Generator) -> None:
    x = torch.randn(7, 100, generator=generator)
    out = Quantized.empty((7, 100), "int4", 128, "cpu")
    assert quantize(x, "int4", 128, out=out, backend=backend) is out
    assert torch.equal(out.payload, quantize(x, "int4", 128, backend=backend).payload)
    assert out.payload.numel() == 350 and out.scale.numel() == 6 and out.numel == 700


def test_bad_arguments_are_errors() -> None:
    x = torch.ones(100)
    with pytest.raises(ValueError, match=r"quantize: expected floating-point values, found torch.int64"):
        quantize(x.long(), "int8")
    with pytest.raises(ValueError, match=r'quantize: expected format to be one of "int8", "int4", "nf4", found "fp4"'):
        quantize(x, "fp4")  # type: ignore[arg-type]
    for block_numel in (32, 96, 4096):
        with pytest.raises(ValueError, match=rf"power of 2 from 64 to 2048, found {block_numel}"):
            quantize(x, "int8", block_numel)
    out = quantize(x, "int8", 64)
    with pytest.raises(
        ValueError, match=r"expected out for \(99,\) int8 in blocks of 64, found \(100,\) int8 in blocks"
    ):
        quantize(x[1:], "int8", 64, out=out)
    with pytest.raises(ValueError, match=r"dequantize: expected out, to accumulate in, found None"):
        dequantize(out, accumulate=True)
    with pytest.raises(ValueError, match=r"floating-point memory of shape \(100,\), found \(200,\) torch.int32"):
        dequantize(out, out=torch.empty(200, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"contiguous .* of shape \(100,\), found \(100,\) .* with strides \(2,\)"):
        dequantize(out, out=torch.empty(200)[::2])
