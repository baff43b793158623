"""Find the repeated blocks of a model (`find_blocks`), between which it can be split, and measure their time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...model import blocks as model_blocks
from ...model.blocks import MIN_SHARE_OF_PARAMETERS, numel
from ...model.recomputing import BufferValues

Blocks = Mapping[str, nn.Module]  # by name in the model
_ROUNDS = 5


def find_blocks(model: nn.Module) -> Blocks:
    """Find the model's blocks as ZeRO does, in order of registration. Raises ValueError if the model has no blocks."""
    blocks = dict(model_blocks.find_blocks(model))
    if not blocks:
        total = numel(model)
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        described = "; ".join(_described(name, module, total) for name, module in lists)
        raise ValueError(
            f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
            "Sequential with repeated elements of the same class, which hold at least "
            f"{MIN_SHARE_OF_PARAMETERS:.0%} of the model's {total} parameters, found "
            f"{described or 'no ModuleList and no Sequential'}; keep the repeated parts of the model "
            "in a single nn.ModuleList or nn.Sequential"
        )
    return blocks


def check_order(blocks: Blocks, called: Sequence[int]) -> None:
    """Raise ValueError unless a forward called every block once, in order."""
    if called != list(range(len(blocks))):
        names = list(blocks)
        shown = ", ".join(names[number] for number in called)
        raise ValueError(
            f"pipeline: expected a forward that calls each of {len(blocks)} blocks once, in the order of registration, "
            f"found the calls: {shown or 'none'}"
        )


def seconds_of_blocks(model: nn.Module, blocks: Blocks, call: Callable[[nn.Module], Any]) -> list[float]:
    """Measure the seconds before the first block, then from each block's entry to the next entry or the end.

    Returns medians of several forwards without gradients, after a warm-up. Random state and buffers are restored.
    Raises ValueError for a model on the meta device, or if a forward does not call every block once, in order.
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
            # Kernels run after the host has started them.
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def entry_of(number: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: entries.append((number, now()))

    # Before the block's other hooks, so that their time counts as the block's.
    handles = [
        block.register_forward_pre_hook(entry_of(number), prepend=True) for number, block in enumerate(blocks.values())
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
    # Without the first round, which warms up.
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _described(name: str, module: nn.Module, total: int) -> str:
    classes = Counter(type(child).__name__ for child in module.children() if numel(child))
    held = ", ".join(f"{count} x {kind}" for kind, count in classes.items()) or "nothing with parameters"
    share = numel(module) / total if total else 0.0
    return f"'{name or '(the model)'}' ({type(module).__name__} of {held}, {share:.0%} of the parameters)"
