"""A rank that dies or never comes is an error on the others, soon, and not a hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.ranks import RankError, RankPool

ROUTES = ["shared_memory", "sockets"]
TIMEOUT_SECONDS = 1.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train_until_rank_1_is_lost(stage: int, route: str, dies: bool) -> tuple[str, str, float]:
    """On rank 0: class and text of the error, and seconds until it came."""
    config = {
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": stage},
        "communication": {"route": route, "timeout_seconds": 60 if dies else TIMEOUT_SECONDS},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(Net(), config)
    engine.train_step((torch.ones(2, 8),))
    if dist.get_rank() == 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT_SECONDS + 1)
        return "late", "", 0.0
    started = time.monotonic()
    try:
        engine.train_step((torch.ones(2, 8),))
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(ranks: RankPool, route: str, stage: int) -> None:
    kind, text, seconds = ranks.fails(2, train_until_rank_1_is_lost, stage, route, False)[0]
    assert kind == "CollectiveError" and text.startswith("rank 0 in ") and "rank 1" in text
    assert "communication.timeout_seconds" in text
    assert TIMEOUT_SECONDS - 0.1 <= seconds < TIMEOUT_SECONDS + 1


@pytest.mark.parametrize("route", ROUTES)
def test_a_rank_that_died_is_an_error_at_once(ranks: RankPool, route: str) -> None:
    survivor, dead = ranks.fails(2, train_until_rank_1_is_lost, 3, route, True)
    assert isinstance(dead, RankError) and dead.kind == "Died"
    kind, text, seconds = survivor
    assert kind == "CollectiveError" and text.startswith("rank 0 in ") and "rank 1" in text and "died" in text
    assert seconds < 5


class OwnOrder(nn.Module):
    """Rank 0 uses its blocks in the order of registration, rank 1 the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if dist.get_rank() == 0 else reversed(self.blocks):
            x = block(x)
        return x.square().mean()


def train_in_own_order() -> str:
    config = {
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0},
        "communication": {"route": "sockets", "timeout_seconds": TIMEOUT_SECONDS},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(OwnOrder(), config)
    try:
        engine.train_step((torch.ones(2, 8),))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_go_different_ways_are_shown_with_their_last_collectives(ranks: RankPool) -> None:
    for text in ranks(2, train_in_own_order):
        assert "no answer from rank" in text
        trails = text.split("The last collectives: ")[1]
        first, second = trails.removeprefix("rank 0: ").rstrip(".").split("; rank 1: ")
        assert first != second and "unit blocks." in first and "unit blocks." in second
