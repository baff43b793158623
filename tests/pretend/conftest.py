"""Ranks whose accelerator is the pretended one."""

from collections.abc import Iterator

import pytest

from lowtide.kernels.cpu_build import BuildError, find_compiler
from tests.kit.ranks import RankPool, in_a_new_process
from tests.pretend.device import BUILD_SECONDS, load


@pytest.fixture(scope="session")
def pretend_ranks() -> Iterator[RankPool]:
    """As `ranks`, on the device "pretend". This process does not see it."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"the pretend device cannot be built here: {error}")
    in_a_new_process(load, timeout=BUILD_SECONDS)  # one process builds it for all, and may take its time
    pool = RankPool(prepare="tests.pretend.device")
    yield pool
    pool.close()
