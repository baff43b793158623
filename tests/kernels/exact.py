"""Comparison with float64, with bounds that follow from the dtype."""

import torch
from torch import Tensor

from lowtide.kernels.exact_sum import NUM_LIMBS, add_limbs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT32_ROUNDING = 2.0**-23


def assert_near_float64(found: Tensor, exact: Tensor, magnitude: Tensor | float | None = None, steps: int = 8) -> None:
    """found is `exact`, (...) float64, up to one rounding to its dtype and `steps` roundings in float32.

    magnitude: of the largest intermediate value of each element, on which float32 rounding acts; broadcast to exact;
    None: |exact|. One unit in the last place is allowed, not half of one: Triton's interpreter truncates to bfloat16.
    """
    assert found.shape == exact.shape, (found.shape, exact.shape)
    assert exact.dtype == torch.float64
    size = exact.abs() if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64).expand(exact.shape)
    info = torch.finfo(found.dtype)
    bound = info.eps * exact.abs() + steps * _FLOAT32_ROUNDING * size + info.smallest_normal * info.eps
    error = (found.double() - exact).abs()
    bad = ~(error <= bound)
    if bad.any():
        worst = int(torch.where(bad, error / bound, 0.0).nan_to_num(float("inf")).argmax())
        at, of = torch.unravel_index(torch.tensor(worst), exact.shape), tuple(exact.shape)
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements are off; the worst at {tuple(map(int, at))} of {of}: expected "
            f"{float(exact.flatten()[worst])!r} within {float(bound.flatten()[worst]):.3g}, found "
            f"{float(found.flatten()[worst])!r}"
        )


def to_limbs(values: Tensor) -> Tensor:
    """The exact sum of finite float64 values, (n,), in limbs."""
    sums = torch.zeros(NUM_LIMBS + 1, dtype=torch.int64, device=values.device)
    add_limbs(sums, values, 0, NUM_LIMBS)
    return sums[:NUM_LIMBS]
