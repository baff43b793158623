"""What a call takes beside its operation: Python, autograd, new memory, and caches that hold something else.

An operation that is timed again and again finds its tensors in the caches, and the memory of its result where it just
gave it back. In a training neither is so, and the more bytes a call moves the more it is: so blocks of several widths
are trained, as many as no cache holds, and what they take longer than their operations is divided among the calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..measured import Curve, Speeds
from ..profile import median_bytes
from ..tracker import Done, Tracker
from .operations import Meet, curve_of

_WIDTHS = (64, 128, 256, 512, 1024)
_ROWS, _TOKENS, _HEAD = 2, 128, 64
_LEAST_BLOCKS, _LEAST_BYTES = 4, 48 << 20  # of parameters
_ROUNDS = 12  # over all widths: a processor is faster in some seconds than in others
_LEAST_SECONDS = 1e-7


class MeasuredBlock(nn.Module):
    """Attention and two linear layers, as most transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, width)."""
        rows, tokens, width = x.shape
        q, k, v = (one.view(rows, tokens, -1, _HEAD).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        done: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return done


@dataclass
class _Half:
    """A forward, or a backward. seconds: the least of several."""

    operations: Done
    seconds: float = float("inf")

    def point(self, speeds: Speeds) -> tuple[float, float]:
        """(median bytes that a call moves, seconds that a call takes longer than its operation)."""
        calls = self.operations.operations
        known = sum(one.calls * speeds.operation(one.name, one.dtype, one.size) for one in calls)
        count = sum(one.calls for one in calls)
        return median_bytes(calls), max(_LEAST_SECONDS, (self.seconds - known) / count)


def measure_calls(say: Callable[[str], None], meet: Meet, speeds: Speeds) -> dict[str, Curve]:
    """Curves "forward call" and "backward call". speeds: of the operations."""
    say("calls")
    trainings = [_Training(width) for width in _WIDTHS]
    for _ in range(_ROUNDS):
        for one in trainings:
            meet()
            one.run()
    return {
        "forward call": curve_of([one.forward.point(speeds) for one in trainings]),
        "backward call": curve_of([one.backward.point(speeds) for one in trainings]),
    }


class _Training:
    """Of a few blocks."""

    def __init__(self, width: int) -> None:
        block_bytes = 4 * sum(param.numel() for param in MeasuredBlock(width).parameters())
        count = max(_LEAST_BLOCKS, math.ceil(_LEAST_BYTES / block_bytes))
        self._model = nn.Sequential(*(MeasuredBlock(width) for _ in range(count)))
        self._x = torch.randn(_ROWS, _TOKENS, width, requires_grad=True)
        self._grad = torch.randn(_ROWS, _TOKENS, width)
        tracker = Tracker([*self._model.parameters(), self._x, self._grad])
        with tracker:
            y = self._model(self._x)
            self.forward = _Half(tracker.done)
            tracker.begin()
            y.backward(self._grad)
            self.backward = _Half(tracker.done)

    def run(self) -> None:
        self._model.zero_grad()
        self._x.grad = None
        start = time.perf_counter()
        y = self._model(self._x)
        middle = time.perf_counter()
        y.backward(self._grad)
        end = time.perf_counter()
        self.forward.seconds = min(self.forward.seconds, middle - start)
        self.backward.seconds = min(self.backward.seconds, end - middle)
