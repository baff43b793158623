"""Grids of settings in which each two meet, in the place of every combination."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one setting of each axis: of each two axes, every setting of one meets every one of the other.

    The rows are in the order of `itertools.product`, and always the same. With two axes they are the product.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    missing = {pair for row in rows for pair in _met(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum(pair in missing for pair in _met(row)))  # the first of equal ones
        missing.difference_update(_met(best))
        chosen.append(best)
    return [tuple(axis[index] for axis, index in zip(axes, row, strict=True)) for row in sorted(chosen)]


def _met(row: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(row), 2)
