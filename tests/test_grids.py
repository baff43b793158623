"""Grids of pairs have each two settings, and few rows."""

from itertools import combinations, product

import pytest

from tests.kit.grids import pairs


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 2), (4, 3, 3), (6, 4, 3, 2), (1, 5, 1), (3, 4, 3, 4)])
def test_each_two_settings_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    axes = [[f"{name}{number}" for number in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    rows = pairs(*axes)
    met = {pair for row in rows for pair in combinations(row, 2)}
    assert met == {pair for one, other in combinations(axes, 2) for pair in product(one, other)}
    one, other = sorted(sizes)[-2:]
    assert one * other <= len(rows) <= 1.5 * one * other and rows == sorted(rows)
