"""Fixtures that every test can ask for."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size, fn, *args)` runs a module-level function on several processes; see `tests/ranks.py`."""
    pool = RankPool()
    yield pool
    pool.close()
