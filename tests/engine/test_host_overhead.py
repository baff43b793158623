"""What lowtide itself does on the host: no more than it did."""

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from tests.kit.models import Chain
from tests.kit.ranks import RankPool, in_a_new_process
from tests.kit.training import settings

WIDTH, NUM_BLOCKS = 128, 30  # 16 blocks of a flat buffer, which 8 ranks divide
MAX_CALLS_IN_A_STEP = 6_990  # of Python: 30 blocks with a parameter each, on the CPU; Python 3.11 makes most


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


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


def calls_of_a_step() -> int:
    """With 8 ranks; the data is the same for any number."""
    model, x = Chain(*(Block() for _ in range(NUM_BLOCKS))), torch.ones(1, WIDTH)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    config = settings(3, optimizer={"type": "sgd"}, gradient_clipping=1.0, train_micro_batch_size_per_gpu=1)
    counts: dict[str, int] = {}
    with lowtide.initialize(model, config) as engine:
        engine.train_step((x,))
        counted(counts, "step", lambda: engine.train_step((x,)))
        assert engine.world_size == 8
    dist.destroy_process_group()
    return counts["step, calls"]


def test_a_step_makes_no_more_calls_than_it_did() -> None:
    """That many ranks cost no more than few is asked in `tests/benchmarks/test_scale.py`."""
    assert 0 < in_a_new_process(calls_of_a_step) <= MAX_CALLS_IN_A_STEP


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
