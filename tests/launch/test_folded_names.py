"""Names that count up become ranges; nothing else changes, and the order stays."""

import pytest

from lowtide.launch.hosts.names import folded


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["node1", "node2", "node3", "login"], "node[1-3],login"),
        (["node01", "node02", "node09", "node10"], "node[01-02],node[09-10]"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n9"], "n09,n9"),
        (["n2", "n1"], "n2,n1"),
        (["r1n1-ib", "r1n2-ib", "r2n3-ib"], "r1n[1-2]-ib,r2n3-ib"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["a", "a1", "a2"], "a,a[1-2]"),
    ],
)
def test_names_are_folded(names: list[str], text: str) -> None:
    assert folded(names) == text
