"""Ranks whose accelerator is the pretended one."""

from collections.abc import Iterator

import pytest

from lowtide.kernels.cpu_build import BuildError, find_compiler
from tests.kit.ranks import RankPool
from tests.pretend.device import load


@pytest.fixture(scope="session")
def pretend_ranks() -> Iterator[RankPool]:
    """As `ranks`, on the device "pretend". This process does not see it."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"the pretend device cannot be built here: {error}")
    pool = RankPool(prepare="tests.pretend.device")
    pool(1, load, process_group=False)  # one process builds it for all
    yield pool
    pool.close()
