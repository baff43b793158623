"""What a step sums and multiplies on the device is what the host would."""

import math

import pytest
import torch

from lowtide.kernels.exact_sum import NUM_LIMBS, add_limbs, from_limbs
from lowtide.kernels.sum_of_squares import clip_factor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run pytest -m gpu"),
]


def test_sums_and_factors_are_those_of_the_host() -> None:
    generator = torch.Generator().manual_seed(1)
    mantissas = torch.rand(5000, generator=generator, dtype=torch.float64)
    values = torch.ldexp(mantissas, torch.randint(-300, 300, (5000,), generator=generator))
    smallest = torch.tensor([5e-324, 0.0, 2.0**-1050 * 3], dtype=torch.float64)
    for case in (values, smallest, values[:0], torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)):
        sums, expected = (torch.zeros(NUM_LIMBS + 3, dtype=torch.int64, device=one) for one in ("cuda", "cpu"))
        add_limbs(sums, case.cuda(), 0, NUM_LIMBS)
        add_limbs(expected, case, 0, NUM_LIMBS)
        assert sums[NUM_LIMBS:].tolist() == expected[NUM_LIMBS:].tolist()
        assert from_limbs(sums[:NUM_LIMBS].tolist()) == from_limbs(expected[:NUM_LIMBS].tolist())
        found = clip_factor(sums, NUM_LIMBS, (NUM_LIMBS + 2, 0), 0.5, 1.0)
        wanted = clip_factor(expected, NUM_LIMBS, (NUM_LIMBS + 2, 0), 0.5, 1.0)
        assert found[0].item() == pytest.approx(wanted[0].item(), rel=1e-14) and found[1].item() == wanted[1].item()
