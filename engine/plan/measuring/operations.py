"""Seconds of torch's operations by size, as the planner counts them: each is called once under its tracker."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..measured import Curve
from ..tracker import Tracker

_WIDTHS = (32, 96, 256, 512, 1024)  # of square matrices
_LENGTHS = (32, 128, 512)  # tokens of attention with 4 heads of 64
_NUMELS = (1 << 10, 1 << 15, 1 << 18, 1 << 21, 3 << 21)  # elements of a tensor
_WIDTH = 256  # of a row of them
_LEAST_SECONDS = 1e-3  # of calls that are timed together
_SAMPLES = 5
_DTYPES = (torch.float32, torch.bfloat16)

Call = Callable[[], Any]
Meet = Callable[[], object]
"""Called before each sample: all ranks begin it together. What else runs on a machine can then only make it longer, so
that the least of several is right, and no rank takes it while the others rest."""


def measure_operations(say: Callable[[str], None], meet: Meet) -> dict[str, Curve]:
    """Curves by name. say: is told what comes."""
    found: dict[str, list[tuple[float, float]]] = {}
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        say(f"products in {name}")
        for call in _products(dtype):
            _measure(call, found, meet)
        say(f"elementwise operations in {name}")
        for numel in _NUMELS:
            for call in _elementwise(dtype, numel):
                _measure(call, found, meet)
    small = torch.ones(16)
    found["view"] = [(0.0, seconds_of(lambda: small.view(4, 4), meet))]
    return {name: curve_of(points) for name, points in found.items()}


def curve_of(points: list[tuple[float, float]]) -> Curve:
    """Of (size, seconds) in any order, the mean of those of one size.

    What takes longer than something larger takes as long as that.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    least, descending = float("inf"), []
    for size in sorted(by_size, reverse=True):
        least = min(least, statistics.fmean(by_size[size]))
        descending.append((size, least))
    sizes, times = zip(*reversed(descending), strict=True)
    return Curve(sizes, times)


def seconds_of(call: Call, meet: Meet) -> float:
    """Of one call: the least of a few samples, each of as many calls as are long enough to be timed.

    Where one thread does all, its own clock leaves out most of what else runs on the machine.
    """
    clock = own_clock()
    call()
    start = clock()
    call()
    count = max(1, min(1000, round(_LEAST_SECONDS / max(clock() - start, 1e-7))))
    least = float("inf")
    for _ in range(_SAMPLES):
        meet()
        start = clock()
        for _ in range(count):
            call()
        least = min(least, (clock() - start) / count)
    return least


def own_clock() -> Callable[[], float]:
    """Seconds of this thread on a processor, or of the world where torch takes several threads."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _measure(call: Call, found: dict[str, list[tuple[float, float]]], meet: Meet) -> None:
    """Under the name and with the size that the planner gives to it."""
    tracker = Tracker([])
    with torch.no_grad(), tracker:
        call()
        operations = [one for one in tracker.done.operations if one.name != "view"]
    (operation,) = operations
    with torch.no_grad():
        seconds = seconds_of(call, meet) / operation.calls
    found.setdefault(f"{operation.dtype} {operation.name}", []).append((operation.size, seconds))


def _products(dtype: torch.dtype) -> Iterator[Call]:
    for width in _WIDTHS:
        a, b = torch.randn(width, width).to(dtype), torch.randn(width, width).to(dtype)
        for left, right in ((a, b.T), (a, b), (a.T, b)):  # of a linear layer: y = x w^T, dx = dy w, dw = dy^T x
            yield lambda left=left, right=right: left @ right  # type: ignore[misc]
    for width in _WIDTHS[:3]:
        a, b = torch.randn(16, width, width).to(dtype), torch.randn(16, width, width).to(dtype)
        yield lambda a=a, b=b: torch.bmm(a, b)  # type: ignore[misc]
    aten = torch.ops.aten
    for length in _LENGTHS:
        q, k, v = (torch.randn(2, 4, length, 64).to(dtype) for _ in range(3))
        yield lambda q=q, k=k, v=v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)  # type: ignore[misc]
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        yield lambda q=q, k=k, v=v, out=out, sums=sums, run=backward: run(out, q, k, v, out, sums, 0.0, True)  # type: ignore[misc]


def _elementwise(dtype: torch.dtype, numel: int) -> Iterator[Call]:
    """Of tensors of so many elements in rows of _WIDTH."""
    aten, rows = torch.ops.aten, numel // _WIDTH
    x, y = torch.randn(rows, _WIDTH).to(dtype), torch.rand(rows, _WIDTH).to(dtype) + 0.5
    weight, column = torch.ones(_WIDTH, dtype=dtype), y[:, :1].contiguous()
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    ids = torch.randint(0, rows, (rows,))
    targets = torch.randint(0, _WIDTH, (rows,))
    mask = torch.ones(rows, _WIDTH, dtype=torch.bool)
    shape, whole = [_WIDTH], [True, True, True]
    normed, mean, rstd = aten.native_layer_norm(x, shape, weight, weight, 1e-5)
    log, soft = torch.log_softmax(x, -1), torch.softmax(x, -1)
    total = torch.tensor(float(rows)).to(dtype)
    grad = torch.tensor(1.0).to(dtype)
    yield lambda: x + y
    yield lambda: x * y
    yield lambda: x / y
    yield lambda: x - y
    yield lambda: x + column
    yield lambda: aten.add_(x, y, alpha=1e-6)
    yield lambda: aten.pow(x, 2)
    yield lambda: aten.neg(x)
    yield lambda: aten.exp(x)
    yield lambda: aten.tanh(x)
    yield lambda: aten.tanh_backward(x, y)
    yield lambda: aten.sigmoid(x)
    yield lambda: aten.relu(x)
    yield lambda: aten.threshold_backward(x, y, 0)
    yield lambda: aten.gelu(x)
    yield lambda: aten.gelu_backward(x, y)
    yield lambda: aten.silu(x)
    yield lambda: aten.silu_backward(x, y)
    yield lambda: aten.sum(x, [0], True)
    yield lambda: aten.mean(x, [-1], True)
    yield lambda: aten.rsqrt(y)
    yield lambda: x.clone()
    yield lambda: aten.copy_(x, y)
    yield lambda: aten._to_copy(x, dtype=other)
    yield lambda: aten.ones_like(x)
    yield lambda: aten.cat([x, y])
    yield lambda: aten.stack([x, y])
    yield lambda: aten.where(mask, x, y)
    yield lambda: aten.masked_fill(x, mask, 0.0)
    yield lambda: aten.native_layer_norm(x, shape, weight, weight, 1e-5)
    yield lambda: aten.native_layer_norm_backward(normed, x, shape, mean, rstd, weight, weight, whole)
    yield lambda: aten._softmax(x, -1, False)
    yield lambda: aten._softmax_backward_data(x, soft, -1, dtype)
    yield lambda: aten._log_softmax(x, -1, False)
    yield lambda: aten._log_softmax_backward_data(x, log, -1, dtype)
    yield lambda: aten.nll_loss_forward(log, targets, None, 1, -100)
    yield lambda: aten.nll_loss_backward(grad, log, targets, None, 1, -100, total)
    yield lambda: aten.embedding(x, ids)
    yield lambda: aten.embedding_dense_backward(x, ids, rows, -1, False)
