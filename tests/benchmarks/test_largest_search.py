"""The search finds the largest model that fits, to the resolution asked for, and tries no model twice."""

import pytest

from tests.benchmarks import Helper


def search(
    helper: Helper, truth: int, start: int = 2, most: int = 1024, resolution: float = 0.05
) -> tuple[int, list[int]]:
    """What is found where models of so many layers fit, and what was tried."""
    tried: list[int] = []

    def fits(layers: int) -> bool:
        tried.append(layers)
        return layers <= truth

    return helper("largest").most_layers(fits, start, most, resolution), tried


@pytest.mark.parametrize("resolution", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("start", [1, 2, 7, 100])
def test_what_is_found_fits_and_is_within_the_resolution(helper: Helper, start: int, resolution: float) -> None:
    for truth in [*range(24), 99, 100, 101, 250, 999]:
        found, tried = search(helper, truth, start, resolution=resolution)
        assert found == truth or 0 < truth - found < resolution * found
        assert len(set(tried)) == len(tried) <= 20 and 0 not in tried
