"""What lowtide itself does on the host: as much with 8 as with 1024 simulated ranks, and no more than it did."""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from tests.kit.models import Chain
from tests.kit.ranks import RankPool
from tests.kit.training import settings

WIDTH, NUM_BLOCKS = 1024, 30  # 2^20 parameters a block: 8 and 1024 ranks divide it without padding
MAX_CALLS_IN_A_STEP = 7_080  # of Python: 30 blocks with a parameter each, on the CPU; Python 3.11 makes most


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Done:
    def wait(self, *timeout: Any) -> bool:
        return True


def nothing(*args: Any, **kwargs: Any) -> Done:
    """The fake backend's own collectives copy once for each rank, which is its time and not ours."""
    return Done()


def counted(counts: dict[str, int], name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; its calls and lines of Python are in `counts`."""

    def count(frame: Any, event: str, argument: Any) -> Any:
        counts[name + ", calls"] += event == "call"
        counts[name + ", lines"] += event == "line"  # each turn of a loop too
        return count

    counts[name + ", calls"] = counts[name + ", lines"] = 0
    gc.collect()  # an engine has cycles: what ends with the one before is not counted, at whatever time it ends
    gc.disable()
    sys.settrace(count)
    result = work()
    sys.settrace(None)
    gc.enable()
    return result


def costs(world_size: int, num_blocks: int = NUM_BLOCKS) -> dict[str, int]:
    """Calls and lines of Python of `initialize` and of a step; the data is the same for any number of ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    model, x = Chain(*(Block() for _ in range(num_blocks))), torch.ones(1, WIDTH)
    config = settings(3, optimizer={"type": "sgd"}, gradient_clipping=1.0, train_micro_batch_size_per_gpu=1)
    counts: dict[str, int] = {}
    engine = counted(counts, "initialize", lambda: lowtide.initialize(model, config))
    engine.train_step((x,))
    counted(counts, "step", lambda: engine.train_step((x,)))
    assert engine.world_size == world_size
    engine.close()
    dist.destroy_process_group()
    return counts


def costs_of_few_and_many() -> list[dict[str, int]]:
    names = ("lowtide.comm.native._all_gather", "lowtide.comm.native._reduce_scatter")
    with mock.patch(names[0], nothing), mock.patch(names[1], nothing):
        costs(8, 1)  # what is done once in a process
        return [costs(world_size) for world_size in (8, 1024)]


def test_8_and_1024_ranks_cost_the_same() -> None:
    with closing(RankPool()) as pool:  # of a process in which nothing has been before
        small, large = pool(1, costs_of_few_and_many, process_group=False)[0]
    assert small.keys() == large.keys()
    for what, count in small.items():
        assert 0 < large[what] < 1.2 * count, (what, small, large)
    assert small["step, calls"] == large["step, calls"] <= MAX_CALLS_IN_A_STEP


def lines_of_starts(numbers_of_layers: Sequence[int]) -> list[int]:
    """Of models without blocks, whose parameters are all in one unit."""
    counts: dict[str, int] = {}
    for number in numbers_of_layers:
        model = nn.ModuleDict({f"layer{place}": nn.Linear(2, 2) for place in range(number)})
        config = {"optimizer": {"type": "adamw"}, "bf16": {"enabled": True}, "train_batch_size": 1}
        counted(counts, f"{number} layers", partial(lowtide.initialize, model, config)).close()
    return [counts[f"{number} layers, lines"] for number in numbers_of_layers]


def test_a_start_does_as_much_for_each_of_many_parameters(ranks: RankPool) -> None:
    # The first is the start of the process too.
    _, few, many = ranks(1, lines_of_starts, [1, 50, 200], process_group=False)[0]
    assert few < many < 4 * few
