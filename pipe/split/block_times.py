"""How long a model's forward takes, block by block."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...model.buffers import BufferValues
from .blocks import Block, check_order

_ROUNDS = 5


def seconds_of_blocks(model: nn.Module, blocks: Sequence[Block], call: Callable[[nn.Module], Any]) -> list[float]:
    """Seconds before the first block, then from the entry of each block to that of the next, or to the end.

    The median of several forwards without gradients, after one that warms up; random state and buffers are as before.
    Raises ValueError for a model on the meta device, and where a forward does not call every block once, in order.
    """
    if any(param.is_meta for param in model.parameters()):
        raise ValueError(
            'pipeline: balance "time" needs a model with memory to measure on, found parameters on the meta device; '
            'use balance "parameters"'
        )
    device = next(model.parameters()).device
    entries: list[tuple[int, float]] = []

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def entry_of(number: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: entries.append((number, now()))

    handles = [
        block.module.register_forward_pre_hook(entry_of(number), prepend=True) for number, block in enumerate(blocks)
    ]
    rounds = []
    try:
        fork = torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type)
        with fork, BufferValues(model), torch.no_grad():
            for _ in range(1 + _ROUNDS):
                entries.clear()
                begin = now()
                call(model)
                check_order(blocks, [number for number, _ in entries])
                moments = [begin, *(moment for _, moment in entries), now()]
                rounds.append([after - before for before, after in itertools.pairwise(moments)])
    finally:
        for handle in handles:
            handle.remove()
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]
