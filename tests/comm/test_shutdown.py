"""`close` leaves no thread of the process group behind; see [Note: threads at exit] in `comm/world.py`."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from tests.kit.ranks import RankPool


def gloo_threads() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name)


def threads_before_and_after_close(transport: str) -> tuple[list[str], list[str]]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": 3},
        "communication": {"transport": transport},
    }
    engine = lowtide.initialize(nn.Linear(3, 3), config, loss_fn=lambda output, batch: output.square().mean())
    engine.train_step((torch.ones(2, 3),))
    deadline = time.monotonic() + 10
    while "pt_gloo_runloop" not in (meanwhile := gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread of a process group names itself some time after it was started
    engine.close()
    return meanwhile, gloo_threads()


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[RankPool]:
    """Processes that no other test has left threads in."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_close_ends_the_threads_of_the_process_group(new_ranks: RankPool, transport: str, world_size: int) -> None:
    for meanwhile, after in new_ranks(world_size, threads_before_and_after_close, transport, process_group=False):
        assert "pt_gloo_runloop" in meanwhile and after == []
