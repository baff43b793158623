"""What an update on the device is told: the factor that the host would have, and whether it counts."""

import math

import pytest
import torch

from lowtide.engine.step.step_sums import Clipping
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.exact_sum import NUM_LIMBS, from_limbs
from lowtide.kernels.sum_of_squares import clip_factor
from tests.kernels.exact import to_limbs

FLAGS, KNOWN = NUM_LIMBS, (NUM_LIMBS + 2, 5)


def sums_of(squares: list[float], flags: tuple[int, int, int] = (0, 0, 5)) -> torch.Tensor:
    return torch.cat([to_limbs(torch.tensor(squares, dtype=torch.float64)), torch.tensor(flags)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinite values, by numpy in Triton's interpreter
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_factor_is_that_of_the_host(backend: Backend, by_hand: bool) -> None:
    for squares in ([], [0.09], [0.09, 1e-9], [9.0, 1e-3, 7e5], [1e300, 3.0], [1e308] * 4, [1e-300]):
        for limit in (0.3, 1e-5, 1.7e3, math.inf):
            factor, skip = clip_factor(
                sums_of(squares), FLAGS, KNOWN, 1 / 3, limit, clips_below=by_hand, backend=backend
            )
            norm = math.sqrt(from_limbs(sums_of(squares)[:NUM_LIMBS].tolist())) / 3
            expected = Clipping(limit, by_hand).factor(norm) / 3
            assert factor.shape == skip.shape == (1,) and factor.dtype == torch.float64
            assert factor.item() == pytest.approx(expected, rel=1e-14) and skip.item() == 0


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_any_flag_leaves_the_update_out(backend: Backend) -> None:
    for flags in ((1, 0, 5), (0, 2, 5), (0, 0, 4), (0, 0, 0), (3, 1, 6)):
        _, skip = clip_factor(sums_of([1.0], flags), FLAGS, KNOWN, 1.0, 1.0, backend=backend)
        assert skip.item() != 0
