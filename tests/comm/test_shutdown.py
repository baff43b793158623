"""`close` leaves no thread of the process group behind; see [Note: threads at exit] in `comm/world.py`."""

from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from tests.ranks import RankPool


def gloo_threads() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name)


def threads_of_an_engine(route: str) -> tuple[list[str], list[str], list[str]]:
    """Gloo's threads in this process before there is an engine, while there is one, and after it was closed."""
    at_first = gloo_threads()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": 3},
        "communication": {"route": route},
    }
    engine = lowtide.initialize(nn.Linear(3, 3), config, loss_fn=lambda output, batch: output.square().mean())
    engine.train_step((torch.ones(2, 3),))
    meanwhile = gloo_threads()
    engine.close()
    return at_first, meanwhile, gloo_threads()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("route", ["shared_memory", "sockets"])
def test_close_ends_the_threads_of_the_process_group(ranks: RankPool, route: str, world_size: int) -> None:
    for at_first, meanwhile, after in ranks(world_size, threads_of_an_engine, route, process_group=False):
        assert meanwhile.count("pt_gloo_runloop") > at_first.count("pt_gloo_runloop")
        assert len(after) <= len(at_first)
