"""A rank that dies, never comes, or was given something else is an error on the others, soon, and not a hang."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import lowtide
from lowtide.comm import World, in_flight
from tests.engine.scripts import run_on_two_ranks
from tests.kit.models import linear_chain
from tests.kit.ranks import RankError, RankPool, on_ranks
from tests.kit.training import limit_waits, refusal, settings

TIMEOUT_SECONDS = 2.5
BATCH = (torch.ones(2, 8),)


def engine_for(stage: int, transport: str, **zero: Any) -> lowtide.Engine:
    communication = {"transport": transport, "timeout_seconds": 60}
    return lowtide.initialize(linear_chain(8, 3), settings(stage, communication=communication, zero_optimization=zero))


def error_of(action: Callable[..., object], *given: Any) -> str:
    """Class and text of the error of a call."""
    try:
        action(*given)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_until_rank_1_is_lost(stage: int, transport: str, how: str) -> tuple[str, float]:
    """On rank 0: the error, and seconds until it came. how: late, dies, closes, or fails."""
    engine = engine_for(stage, transport)
    engine.train_step(BATCH)
    if how == "late":
        limit_waits(engine, TIMEOUT_SECONDS)
    if dist.get_rank() == 0:
        started = time.monotonic()
        text = error_of(engine.train_step, BATCH)
        seconds = time.monotonic() - started
        if how == "late":
            _get_default_store().set("rank 0 has given up", "")
        return text, seconds
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        with engine:
            raise ArithmeticError("a fault of rank 1 alone")
    if how == "closes":
        engine.close()
    else:
        _get_default_store().wait(["rank 0 has given up"], timedelta(seconds=50))
    return how, 0.0


LEFT = "rank 1 has left: it closed its engine, or its script came to an end. All ranks must"
GONE = "A rank died, has left, or the ranks make different calls of the engine. "
ENDS = "end all ranks at the smallest number of batches."
LATE, DIED = ("rank 1", "communication.timeout_seconds"), ("rank 1", "died")


@pytest.mark.parametrize(
    ("how", "transport", "stage", "told"),
    [
        ("late", "shared_memory", 3, LATE),
        ("late", "sockets", 2, LATE),
        ("dies", "shared_memory", 3, DIED),
        ("dies", "sockets", 3, DIED),
        ("closes", "shared_memory", 3, (LEFT, ENDS)),
        ("closes", "sockets", 3, (GONE, ENDS)),
        ("closes", "native", 3, (GONE, ENDS)),
        ("fails", "shared_memory", 3, ("rank 1 left after an error. See the output of that rank.",)),
    ],
)
def test_a_rank_that_is_lost_is_an_error_soon(
    ranks: RankPool, how: str, transport: str, stage: int, told: tuple[str, ...]
) -> None:
    """After the timeout where it still does not come, else at once, and not after that of the config."""
    has_group = how in ("late", "dies")
    (text, seconds), lost = ranks.fails(2, train_until_rank_1_is_lost, stage, transport, how, process_group=has_group)
    assert text.startswith("CollectiveError: rank 0 in ") and all(words in text for words in told), text
    assert how != "fails" or ENDS not in text
    assert (TIMEOUT_SECONDS - 0.1 if how == "late" else 0) <= seconds < 45 and "GLHF" not in text
    assert how != "dies" or (isinstance(lost, RankError) and lost.kind == "Died")


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
    assert f"{LEFT} make the" in ends[0].err


def ask_after_rank_1_has_left(values_differ: bool) -> str:
    """The error of rank 0 in what is no step, and is made of the backend's own collectives.

    values_differ: rank 1 leaves when all ranks have found that their values differ, and are to say them.
    """
    engine = engine_for(0, "auto")
    agree = engine._mesh.gather_values
    if dist.get_rank() == 0:
        return error_of(agree, 0) if values_differ else error_of(engine.save_checkpoint, "nowhere")
    if values_differ:
        with mock.patch.object(World, "gather_objects", side_effect=RuntimeError("rank 1 leaves")):
            assert "rank 1 leaves" in error_of(agree, 1)
    engine.close()
    return ""


@pytest.mark.parametrize("values_differ", [False, True])
def test_a_rank_that_left_is_an_error_outside_of_steps_too(ranks: RankPool, values_differ: bool) -> None:
    text = ranks(2, ask_after_rank_1_has_left, values_differ, process_group=False)[0]
    assert text.startswith("CollectiveError: rank 0 in a") and "no answer from rank 1 after" in text
    assert values_differ or text.endswith("All ranks must call engine.save_checkpoint().")


@on_ranks(2)
def test_ranks_that_go_different_ways_are_shown_with_their_last_collectives() -> None:
    """Rank 0 trains, rank 1 asks for the weights."""
    engine = engine_for(3, "sockets", stage3_prefetch_bucket_size=0)
    limit_waits(engine, TIMEOUT_SECONDS)
    with mock.patch.object(in_flight, "_WAIT_SECONDS", 30.0):  # until the other rank has said its last collectives too
        text = error_of(engine.train_step, BATCH) if dist.get_rank() == 0 else error_of(engine.state_dict)
    assert "no answer from rank" in text
    trails = text.split("The last collectives: ")[1]
    first, second = trails.removeprefix("rank 0: ").rstrip(".").split("; rank 1: ")
    assert "reduction of unit" in first and "unit" in second and "reduction" not in second


CONFIG: dict[str, Any] = {"optimizer": {"type": "sgd"}, "gradient_clipping": 1.0}


def initialize(model: nn.Module, config: dict[str, Any] = CONFIG) -> lowtide.Engine:
    return lowtide.initialize(model, config)


def with_another_stage_and_optimizer(rank: int) -> lowtide.Engine:
    optimizer = {"type": "sgd", "params": {"lr": 0.1, **({"momentum": 0.5} if rank else {})}}
    return initialize(nn.Linear(3, 2), {"optimizer": optimizer, "zero_optimization": {"stage": 1 + rank}})


def with_frozen_weight(rank: int) -> lowtide.Engine:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(rank == 0)
    return initialize(model)


MISTAKES: tuple[tuple[Callable[[int], lowtide.Engine], str], ...] = (
    (
        lambda rank: initialize(nn.Linear(3, 2), {**CONFIG, "gradient_clipping": 1.0 + rank}),
        "different configs: gradient_clipping: rank 0 has 1.0, rank 1 has 2.0.",
    ),
    (
        with_another_stage_and_optimizer,
        "different configs: zero_optimization.stage: rank 0 has 1, rank 1 has 2; optimizer.params.momentum: "
        "rank 0 has 0.0, rank 1 has 0.5. All",
    ),
    (
        lambda rank: initialize(nn.Linear(3, 2 + rank)),
        "different models: weight: rank 0 has (2, 3) torch.float32, rank 1 has (3, 3) torch.float32",
    ),
    (
        lambda rank: initialize(nn.Sequential(*(nn.Linear(3, 3) for _ in range(1 + rank)))),
        "different models: 1.weight: rank 0 has nothing, rank 1 has (3, 3) torch.float32",
    ),
    (
        lambda rank: initialize(nn.Linear(3, 2).to([torch.float32, torch.float64][rank])),
        "weight: rank 0 has (2, 3) torch.float32, rank 1 has (2, 3) torch.float64",
    ),
    (with_frozen_weight, "weight: rank 0 has (2, 3) torch.float32, rank 1 has (2, 3) torch.float32 frozen"),
)


@on_ranks(2)
def test_both_sides_are_shown_on_every_rank() -> None:
    for make, words in MISTAKES:
        text = refusal(make, dist.get_rank(), kind=RuntimeError)
        assert "the ranks have " in text and words in text and "All ranks must pass the same" in text
