"""How ranks find each other at the start, and what they say where they do not."""

import os

import pytest

from lowtide.comm import CollectiveError, World
from tests.kit.ranks import environment, free_port


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError) as caught:
        World.join("cpu", 0.2)
    text = str(caught.value)
    assert text.startswith(f"rank 0 of 2: not all ranks connected to 127.0.0.1:{os.environ['MASTER_PORT']} within ")
    assert "(Timed out after " in text and "1/2 clients joined.). A rank died or has left, another program " in text
    assert "the ranks make different numbers of engines. A slow rank needs a larger communication.timeout_s" in text


@pytest.mark.parametrize(("rank", "size"), [("3", "2"), ("2", "2"), ("-1", "2"), ("0", "0"), ("one", "2")])
def test_a_rank_that_is_not_in_the_world_is_told_at_once(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    for name, value in {**environment(0, 2, free_port()), "RANK": rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    words = f"expected 0 <= RANK < WORLD_SIZE, found RANK={rank} and WORLD_SIZE={size}. Number the ranks"
    with pytest.raises(ValueError, match=words):
        World.join("cpu", 60)
