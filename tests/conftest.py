"""Fixtures that every test can ask for."""

import signal
from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size, fn, *args)` runs a module-level function on several processes; see `tests/ranks.py`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _sigint_ends_a_process() -> None:
    """A shell that runs tests in the background has them ignore SIGINT, and so would every process that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
