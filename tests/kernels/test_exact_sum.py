"""Sums in fixed point: exact, and the same bits in every order."""

import math

import torch
from torch import Tensor

from lowtide.kernels.exact_sum import NUM_LIMBS, add_limbs, from_limbs
from tests.kernels.exact import to_limbs

SMALLEST = 5e-324
LARGEST = torch.finfo(torch.float64).max


def exact_sum(values: Tensor) -> float:
    return from_limbs(to_limbs(values).tolist())


def wide_values(count: int, seed: int) -> Tensor:
    """Float64 values of very different sizes, none negative."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.rand(count, generator=generator, dtype=torch.float64)
    exponent = torch.randint(-300, 300, (count,), generator=generator)
    return torch.ldexp(mantissa, exponent)


def test_the_sum_is_that_of_fsum() -> None:
    for seed in range(20):
        values = wide_values(1000, seed)
        assert exact_sum(values) == math.fsum(values.tolist())


def test_the_kernel_adds_the_same() -> None:
    values = torch.cat([wide_values(3000, 1), -wide_values(10, 2)])
    few = torch.tensor([0.0, -0.0, SMALLEST, -LARGEST, 2.0**-1050 * 3], dtype=torch.float64)
    bad = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64)
    for case in (values, few, bad, few[:0], bad[1:]):
        found, expected = (torch.arange(NUM_LIMBS + 3) for _ in range(2))
        add_limbs(found, case, 2, 0, backend="triton")
        add_limbs(expected, case, 2, 0, backend="reference")
        assert found[0] == expected[0] == (not case.isfinite().all())
        assert from_limbs(found[2:-1].tolist()) == from_limbs(expected[2:-1].tolist())
        assert found[-1] == expected[-1] == NUM_LIMBS + 2 and found[1] == expected[1] == 1


def test_limbs_do_not_depend_on_order_or_on_the_split_over_ranks() -> None:
    values = wide_values(999, 3)
    whole = to_limbs(values)
    order = torch.randperm(999, generator=torch.Generator().manual_seed(4))
    assert torch.equal(to_limbs(values[order]), whole)
    for count in (2, 3, 7):
        parts = [to_limbs(part) for part in values[order].chunk(count)]
        assert torch.equal(torch.stack(parts).sum(0), whole)


def test_extremes() -> None:
    for value in (0.0, SMALLEST, 2.2250738585072014e-308, 2.0**-1050 * 3, 1.0, 2.0**53 + 2, LARGEST):
        assert exact_sum(torch.tensor([value], dtype=torch.float64)) == value
    assert exact_sum(torch.tensor([], dtype=torch.float64)) == 0.0
    assert exact_sum(torch.full((3,), LARGEST, dtype=torch.float64)) == math.inf
    assert exact_sum(torch.full((3,), SMALLEST, dtype=torch.float64)) == 3 * SMALLEST


def test_the_sum_is_rounded_to_nearest_even() -> None:
    half = torch.tensor([1.0, 2.0**-53], dtype=torch.float64)
    assert exact_sum(half) == 1.0
    assert exact_sum(torch.cat([half, torch.tensor([SMALLEST], dtype=torch.float64)])) == 1.0 + 2.0**-52


def test_limbs_have_room_for_the_sums_of_many_ranks() -> None:
    limbs = to_limbs(torch.full((1000,), LARGEST, dtype=torch.float64))
    assert limbs.shape == (NUM_LIMBS,) and limbs.dtype == torch.int64
    assert int(limbs.max()) < 2**33 * 1000  # so 2^20 ranks of 1000 blocks each stay below 2^63
