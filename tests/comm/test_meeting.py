"""How ranks find each other at the start, and what they say where they do not."""

import os

import pytest

from lowtide.comm import CollectiveError, World
from tests.ranks import environment, free_port


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError) as caught:
        World.join("cpu", 0.2)
    text = str(caught.value)
    assert text.startswith(f"rank 0 of 2: not all ranks came to 127.0.0.1:{os.environ['MASTER_PORT']}, in ")
    assert "(Timed out after " in text and "1/2 clients joined.). A rank died or has left, another program " in text
    assert "the ranks make different numbers of engines; a slow rank needs a larger communication.timeout_s" in text
