"""Whoever waits for counters of others learns who will not come."""

import os
from unittest.mock import Mock

import pytest
import torch

from lowtide.comm.errors import CollectiveError
from lowtide.comm.shared_segment import COUNTERS_NUMEL, POSTED, SharedCounters


def test_a_rank_that_has_come_and_gone_while_it_was_looked_at_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(2 * COUNTERS_NUMEL, dtype=torch.int64)
    here, there = (SharedCounters(memory, rank, (0, 1), [os.getpid()] * 2, 20.0, Mock()) for rank in range(2))
    plain = SharedCounters._fate

    def come_and_go(self: SharedCounters, rank: int) -> object:
        there.close()
        fate = plain(self, rank)
        there.store(POSTED, 3)
        return fate

    here.store(POSTED, 3)
    monkeypatch.setattr(SharedCounters, "_fate", come_and_go)
    here.wait_for(POSTED, 3, "a gather", 0)
    here.store(POSTED, 4)
    with pytest.raises(CollectiveError, match=r"^rank 0 in a gather: rank 1 "):
        here.wait_for(POSTED, 4, "a gather", 1)
    here.close()
