"""A rank that does not come is our error on the others, where NCCL's manners would let them wait for ever."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.comm.collective_watchdog import CollectiveWatchdog
from tests.kit.models import linear_chain
from tests.kit.ranks import RankPool
from tests.kit.training import refusal, settings
from tests.pretend import group

TIMEOUT_SECONDS = 2.5


def train_until_rank_1_is_late(pipeline: int, stage: int, given_up: Path) -> tuple[str, float]:
    """On rank 0: the text of the error, and seconds until it came. given_up: a file that is there when that is over."""
    group.join_on_cpu()
    communication = {"transport": "native", "timeout_seconds": TIMEOUT_SECONDS}
    config = settings(stage, device="cpu", parallel={"pipeline": pipeline}, communication=communication)
    engine = lowtide.initialize(linear_chain(8, 2), config)
    engine.train_step((torch.ones(2, 8),))
    if dist.get_rank() == 1:
        while not given_up.exists():
            time.sleep(0.05)
        return "", 0.0
    started = time.monotonic()
    text = refusal(engine.train_step, (torch.ones(2, 8),), kind=lowtide.CollectiveError)
    seconds = time.monotonic() - started
    assert "no answer from rank 1" in refusal(engine.train_step, (torch.ones(2, 8),), kind=lowtide.CollectiveError)
    engine.close()
    given_up.touch()
    assert "lowtide overdue" not in [thread.name for thread in threading.enumerate()]
    return text, seconds


@pytest.mark.parametrize(("pipeline", "stage"), [(1, 2), (2, 0)])
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(
    pretend_ranks: RankPool, tmp_path: Path, pipeline: int, stage: int
) -> None:
    arguments = pipeline, stage, tmp_path / "given up"
    text, seconds = pretend_ranks(2, train_until_rank_1_is_late, *arguments, process_group=False)[0]
    assert text.startswith("rank 0 in ") and "no answer from rank 1 after" in text
    assert "communication.timeout_seconds" in text
    assert TIMEOUT_SECONDS - 0.1 <= seconds < 45  # while rank 1 would still not come


def test_what_nobody_was_told_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    collective_watchdog = CollectiveWatchdog()
    collective_watchdog.start(0, torch.device("cpu"), 0.1)
    collective_watchdog.begin("gather of unit (root)", [1], lambda others: "", waits=True)
    deadline = time.monotonic() + 60
    while collective_watchdog.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    text = refusal(collective_watchdog.stop, kind=lowtide.CollectiveError)
    assert "rank 0 in gather of unit (root): no answer from rank 1" in text and text.endswith(
        "To run a forward on a single rank, let all ranks enter `with engine.gathered():` (zero.GatheredParameters in "
        "lowtide.deepspeed) around it."
    )
    collective_watchdog.stop()  # once
