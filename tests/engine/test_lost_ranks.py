"""A rank that dies or never comes is an error on the others, soon, and not a hang."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import lowtide
from tests.engine.scripts import run_on_two_ranks
from tests.kit.models import Chain, linear_chain
from tests.kit.ranks import RankError, RankPool

ROUTES = ["shared_memory", "sockets"]
TIMEOUT_SECONDS = 2.5


def train_until_rank_1_is_lost(stage: int, transport: str, how: str) -> tuple[str, str, float]:
    """On rank 0: class and text of the error, and seconds until it came. how: late, dies, closes, or fails."""
    config = {
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": stage},
        "communication": {"transport": transport, "timeout_seconds": TIMEOUT_SECONDS if how == "late" else 60},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(linear_chain(8, 2), config)
    engine.train_step((torch.ones(2, 8),))
    if dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails":
            with engine:
                raise ArithmeticError("a fault of rank 1 alone")
        if how == "closes":
            engine.close()
            return "closed", "", 0.0
        _get_default_store().wait(["rank 0 has given up"], timedelta(seconds=50))
        return "late", "", 0.0
    started = time.monotonic()
    try:
        engine.train_step((torch.ones(2, 8),))
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    finally:
        if how == "late":
            _get_default_store().set("rank 0 has given up", "")
    return "nothing", "", 0.0


@pytest.mark.parametrize(("transport", "stage"), [("shared_memory", 0), ("shared_memory", 3), ("sockets", 2)])
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(ranks: RankPool, transport: str, stage: int) -> None:
    kind, text, seconds = ranks.fails(2, train_until_rank_1_is_lost, stage, transport, "late")[0]
    assert kind == "CollectiveError" and text.startswith("rank 0 in ") and "rank 1" in text
    assert "communication.timeout_seconds" in text
    assert TIMEOUT_SECONDS - 0.1 <= seconds < 45  # while rank 1 would still not come


@pytest.mark.parametrize("transport", ROUTES)
def test_a_rank_that_died_is_an_error_at_once(ranks: RankPool, transport: str) -> None:
    survivor, dead = ranks.fails(2, train_until_rank_1_is_lost, 3, transport, "dies")
    assert isinstance(dead, RankError) and dead.kind == "Died"
    kind, text, seconds = survivor
    assert kind == "CollectiveError" and text.startswith("rank 0 in ") and "rank 1" in text and "died" in text
    assert seconds < 45  # of 60


@pytest.mark.parametrize(
    ("transport", "how", "told"),
    [
        (
            "shared_memory",
            "closes",
            "rank 1 has left: it closed its engine, or its script came to an end. All ranks must",
        ),
        ("shared_memory", "fails", "rank 1 left after an error. See the output of that rank."),
        ("sockets", "closes", "A rank died, has left, or the ranks make different calls of the engine. "),
        ("native", "closes", "A rank died, has left, or the ranks make different calls of the engine. "),
    ],
)
def test_a_rank_that_left_is_an_error_at_once(ranks: RankPool, transport: str, how: str, told: str) -> None:
    found, _ = ranks.fails(2, train_until_rank_1_is_lost, 3, transport, how, process_group=False)
    kind, text, seconds = found
    assert kind == "CollectiveError" and text.startswith("rank 0 in ") and told in text
    assert ("end all ranks at the smallest number of batches." in text) == (how == "closes")
    assert "GLHF" not in text and seconds < 45


SCRIPT = """
config = {"optimizer": {"type": "sgd"}}
engine = lowtide.initialize(torch.nn.Linear(2, 1), config, loss_fn=lambda output, batch: output.mean())
for step in range(2 - engine.rank):
    engine.train_step(torch.ones(2, 2))
sys.exit(0)
"""


def test_a_script_that_ends_on_one_rank_is_told_on_the_others(tmp_path: Path) -> None:
    ends = run_on_two_ranks(SCRIPT, tmp_path)
    assert [end.status for end in ends] == [1, 0], ends
    assert "rank 1 has left: it closed its engine, or its script came to an end. All ranks must make the" in ends[0].err


def ask_after_rank_1_has_left() -> str:
    """The error of rank 0 in what is no step, and is made of the backend's own collectives."""
    config = {"optimizer": {"type": "sgd"}, "communication": {"timeout_seconds": 60}}
    engine = lowtide.initialize(linear_chain(8, 2), config)
    if dist.get_rank() == 1:
        engine.close()
        return ""
    try:
        engine.save_checkpoint("nowhere")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_left_is_an_error_outside_of_steps_too(ranks: RankPool) -> None:
    text = ranks(2, ask_after_rank_1_has_left, process_group=False)[0]
    assert text.startswith("CollectiveError: rank 0 in a") and "no answer from rank 1 after" in text
    assert text.endswith("All ranks must call engine.save_checkpoint().")


def train_or_look() -> str:
    """Rank 0 trains, rank 1 asks for the weights."""
    config = {
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0},
        "communication": {"transport": "sockets", "timeout_seconds": TIMEOUT_SECONDS},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(Chain(*(nn.Linear(8, 8) for _ in range(3))), config)
    try:
        engine.train_step((torch.ones(2, 8),)) if dist.get_rank() == 0 else engine.state_dict()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_go_different_ways_are_shown_with_their_last_collectives(ranks: RankPool) -> None:
    for text in ranks(2, train_or_look):
        assert "no answer from rank" in text
        trails = text.split("The last collectives: ")[1]
        first, second = trails.removeprefix("rank 0: ").rstrip(".").split("; rank 1: ")
        assert first.endswith("the next action") and "unit" in second
