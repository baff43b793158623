"""Sums of squares by block equal float64, do not depend on where a block lies, and tell of inf and nan."""

import math

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.sum_of_squares import squares_by_block, squares_by_block_reference, squares_of_each
from tests.kernels.exact import DTYPES
from tests.kit.grids import pairs
from tests.kit.training import refusal

BACKENDS = ["triton", "reference"]
SHAPES = [(1,), (1024,), (11, 1023)]
FLOAT32_ROUNDING = 2.0**-23


def exact_squares(x: Tensor, block_numel: int) -> Tensor:
    flat = x.double().reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block_numel)).view(-1, block_numel).square().sum(1)


def assert_near(found: Tensor, x: Tensor, block_numel: int) -> None:
    """A sum of n positive squares in float32: each rounds once, and so does each of log2(n) to n additions.

    The reference rounds a root and squares it, too; it may add one by one.
    """
    exact = exact_squares(x, block_numel)
    assert found.dtype == torch.float64 and found.shape == exact.shape
    assert ((found - exact).abs() <= (block_numel + 6) * FLOAT32_ROUNDING * exact).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("shape", "dtype", "backend"), pairs(SHAPES, DTYPES, BACKENDS), ids=str)
def test_it_equals_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator).to(dtype)
    for block_numel in (1024, 64):
        assert_near(squares_by_block(x, block_numel, backend=backend), x, block_numel)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_numel", [16, 2048, 4096])
def test_a_list_of_tensors(block_numel: int, backend: Backend, generator: torch.Generator) -> None:
    shapes = [(7,), (0,), (4096,), (3, 5000), (1,), (8192,), (2, 0)]
    tensors = [torch.randn(shape, generator=generator).to(DTYPES[index % 3]) for index, shape in enumerate(shapes)]
    tensors.append(torch.randn(8200, generator=generator)[3:])  # at no multiple of 16 bytes
    tensors.append(torch.randn(60, 70, generator=generator).t())
    found = squares_of_each(tensors, block_numel, backend=backend)
    assert len(found) == len(tensors)
    for one, tensor in zip(found, tensors, strict=True):
        assert_near(one, tensor, block_numel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_has_the_same_sum_wherever_it_lies(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn(9 * 1024, generator=generator).to(dtype)
    whole = squares_by_block(x, 1024, backend="triton")
    for first in (1, 2, 5, 8):
        part = squares_by_block(x[first * 1024 :], 1024, backend="triton")
        assert torch.equal(part, whole[first:])
    in_list = squares_of_each([x, x[1024:], x[: 8 * 1024 + 7]], 1024, backend="triton")
    assert torch.equal(in_list[1], in_list[0][1:]) and torch.equal(in_list[2][:8], in_list[0][:8])
    off_by_one = torch.cat([x[:1], x])[1:]  # the same elements at an odd address
    assert torch.equal(squares_by_block(off_by_one, 1024, backend="triton"), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_neither_overflow_nor_vanish_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    info, flag = torch.finfo(dtype), torch.zeros(1, dtype=torch.int32)
    values = [info.max, -info.max, info.smallest_normal, 0.0]
    if dtype != torch.bfloat16:  # Triton's interpreter takes denormal bfloat16 for zeros
        values.append(info.smallest_normal * info.eps)
    for value in values:
        x = torch.tensor([value] * 16 + [0.0] * 16).to(dtype)
        found = squares_by_block(x, 16, non_finite=flag, backend="triton")
        assert math.isclose(float(found[0]), 16 * float(x[0].double()) ** 2, rel_tol=1e-6)
        assert float(found[1]) == 0 and flag.item() == 0
        if value > 1:
            assert_near(squares_by_block_reference(x, 16), x, 16)


@pytest.mark.parametrize(
    ("bad", "dtype", "backend"), pairs((torch.inf, -torch.inf, torch.nan), DTYPES, BACKENDS), ids=str
)
def test_a_value_that_is_not_finite_is_told(
    bad: float, dtype: torch.dtype, backend: Backend, generator: torch.Generator
) -> None:
    for numel in (6 * 1024, 6 * 1024 - 100):
        x = torch.randn(numel, generator=generator).to(dtype)
        flag = torch.zeros(1, dtype=torch.int32)
        squares_by_block(x, 1024, non_finite=flag, backend=backend)
        assert flag.item() == 0
        x[int(torch.randint(4096, 5120, (1,), generator=generator))] = bad
        found = squares_by_block(x, 1024, non_finite=flag, backend=backend)
        assert found.isfinite().tolist() == [True, True, True, True, False, True]
        assert flag.item() == 1
        squares_by_block(torch.ones(10), 1024, non_finite=flag, backend=backend)
        assert flag.item() == 1  # it is never cleared


def test_float64_stays_exact(generator: torch.Generator) -> None:
    x = torch.randn(3000, generator=generator, dtype=torch.float64)
    found = squares_by_block(x, 1024)
    torch.testing.assert_close(found, exact_squares(x, 1024), rtol=1e-12, atol=0)


def test_bad_arguments_are_errors() -> None:
    x = torch.ones(64)
    for block_numel in (0, 8, 1000, 8192):
        text = refusal(squares_by_block, x, block_numel)
        assert f"block_numel, a power of 2 from 16 to 4096, found {block_numel}" in text
    text = refusal(squares_of_each, [x, x.int()], 64)
    assert "expected floating-point values, found torch.int32 at index 1" in text
    text = refusal(squares_by_block, x, 64, non_finite=torch.zeros(2, dtype=torch.bool))
    assert "expected non_finite of shape (1,) and int32, found (2,) torch.bool" in text
