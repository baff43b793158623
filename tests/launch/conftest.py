"""Fixtures of the launcher's tests."""

from collections.abc import Iterator

import pytest

from lowtide.launch.wire.loop import Loop
from tests.launch.network import Network, require_network


@pytest.fixture
def loop() -> Iterator[Loop]:
    """One that waits for a test's sockets."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three hosts: login, where a user sits, and n1 and n2, where jobs run; see `tests/launch/network.py`."""
    require_network()
    network = Network(tmp_path_factory.mktemp("network"), ["login", "n1", "n2"])
    yield network
    network.close()


@pytest.fixture
def hosts(network: Network) -> Iterator[Network]:
    """The hosts, all on and connected; a test that leaves processes behind on one of them fails."""
    yield network
    left = network.repair()
    assert not left, f"these processes outlived their test: {left}"
