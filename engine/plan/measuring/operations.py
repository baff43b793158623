"""Measure seconds of torch's operations by size, of the overhead of calls, and of an engine on the host.

The tracker of the planner names each operation and its size.

[Note: calls]
A repeated operation finds its tensors in caches, and the memory for its result where the last call freed it. In a
training neither holds, and the difference grows with the bytes of a call. Therefore blocks of several widths are
trained, more than fit into caches. The time beyond their operations (Python, autograd, new memory, cold caches) is
divided by the number of calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....comm import World
from ...blueprint.blueprint import Blueprint
from ...build import initialize
from ...config.config import Config
from ..estimate import estimate, writes_gradients
from ..machine import Machine
from ..measured import Curve, Measured, Speeds
from ..meta_run import MetaRun
from ..profile import Operation, median_bytes
from ..tracker import Tracker

_WIDTHS = (32, 96, 256, 512, 1024)  # of square matrices
_LENGTHS = (32, 128, 512)  # tokens of attention with 4 heads of 64
_NUMELS = (1 << 10, 1 << 15, 1 << 18, 1 << 21, 3 << 21)  # elements of a tensor
_WIDTH = 256  # of a row
_LEAST_SECONDS = 1e-3  # of a sample
_SAMPLES = 5
_DTYPES = (torch.float32, torch.bfloat16)

Call = Callable[[], Any]
Meet = Callable[[], object]
"""Called before each sample, so that all ranks begin together and no rank is measured while the rest is idle. Then load
from other processes can only lengthen a sample, so the minimum of several samples is right."""


def measure_operations(say: Callable[[str], None], meet: Meet) -> dict[str, Curve]:
    """Return curves of torch's operations. say: takes a line for each kind of operation."""
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
    """Make a curve of (size, seconds) points in any order. Points of a size are averaged.

    A size never takes longer than a larger size.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    least, descending = float("inf"), []
    for size in sorted(by_size, reverse=True):
        # From the largest size down: noise of a small size cannot exceed a larger size.
        least = min(least, statistics.fmean(by_size[size]))
        descending.append((size, least))
    sizes, times = zip(*reversed(descending), strict=True)
    return Curve(sizes, times)


def seconds_of(call: Call, meet: Meet) -> float:
    """Return the seconds of a call: the minimum over samples of enough calls to be timed.

    With a single thread its clock excludes most other load of the machine.
    """
    clock = own_clock()
    call()
    start = clock()
    call()
    # A clock of a microsecond would spoil the time of a short call, so a sample has at least a millisecond of calls.
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
    """Return a clock of this thread's CPU time, or of real time if torch uses several threads."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _measure(call: Call, found: dict[str, list[tuple[float, float]]], meet: Meet) -> None:
    """Time a call, under the name and the size that the planner gives it."""
    tracker = Tracker([])
    with torch.no_grad(), tracker:
        call()
        operations = [operation for operation in tracker.counts.operations if operation.name != "view"]
    # A call must be a single operation of the tracker, or its seconds would belong to several curves.
    (operation,) = operations
    with torch.no_grad():
        seconds = seconds_of(call, meet) / operation.calls
    found.setdefault(f"{operation.dtype} {operation.name}", []).append((operation.size, seconds))


def _products(dtype: torch.dtype) -> Iterator[Call]:
    for width in _WIDTHS:
        a, b = torch.randn(width, width).to(dtype), torch.randn(width, width).to(dtype)
        for left, right in ((a, b.T), (a, b), (a.T, b)):  # as in a linear layer: y = x w^T, dx = dy w, dw = dy^T x
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
    """Yield elementwise calls on tensors of `numel` elements in rows of _WIDTH."""
    aten, rows = torch.ops.aten, numel // _WIDTH
    # Shifted from zero, for divisions and square roots.
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


# -- overhead of a call, see [Note: calls] -----------------------------------------------------------------------------


_BLOCK_WIDTHS = (64, 128, 256, 512, 1024)
_ROWS, _TOKENS, _HEAD = 2, 128, 64
_LEAST_BLOCKS, _LEAST_BYTES = 4, 48 << 20  # of parameters
_ROUNDS = 12  # over all widths, because the speed of a CPU varies over seconds
_LEAST_OF_CALL = 1e-7  # seconds


class MeasuredBlock(nn.Module):
    """Attention and two linear layers, as in most transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block. x: (rows, tokens, width) -> the same shape."""
        rows, tokens, width = x.shape
        q, k, v = (y.view(rows, tokens, -1, _HEAD).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        done: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return done


def measure_calls(say: Callable[[str], None], meet: Meet, speeds: Speeds) -> dict[str, Curve]:
    """Return the curves "forward call" and "backward call". speeds: of the operations."""
    say("calls")
    trainings = [_training(width) for width in _BLOCK_WIDTHS]
    rounds = []
    for _ in range(_ROUNDS):
        times = []
        for run, _, _ in trainings:
            meet()
            times.append(run())
        rounds.append(times)
    forward, backward = [], []
    for (_, of_forward, of_backward), of_rounds in zip(trainings, zip(*rounds, strict=True), strict=True):
        seconds_of_forward, seconds_of_backward = map(min, zip(*of_rounds, strict=True))
        forward.append(_point(of_forward, seconds_of_forward, speeds))
        backward.append(_point(of_backward, seconds_of_backward, speeds))
    return {"forward call": curve_of(forward), "backward call": curve_of(backward)}


def _training(width: int) -> tuple[Callable[[], tuple[float, float]], Sequence[Operation], Sequence[Operation]]:
    """Return a function that trains a few blocks, and the operations of its forward and of its backward.

    The function returns (seconds of the forward, seconds of the backward).
    """
    block_bytes = 4 * sum(param.numel() for param in MeasuredBlock(width).parameters())
    # More parameters than caches hold, as in a training: see [Note: calls].
    count = max(_LEAST_BLOCKS, math.ceil(_LEAST_BYTES / block_bytes))
    model = nn.Sequential(*(MeasuredBlock(width) for _ in range(count)))
    x = torch.randn(_ROWS, _TOKENS, width, requires_grad=True)
    grad = torch.randn(_ROWS, _TOKENS, width)
    tracker = Tracker([*model.parameters(), x, grad])
    with tracker:
        y = model(x)
        forward = tracker.counts.operations
        tracker.begin()
        y.backward(grad)
        backward = tracker.counts.operations

    def run() -> tuple[float, float]:
        model.zero_grad()
        x.grad = None
        start = time.perf_counter()
        y = model(x)
        middle = time.perf_counter()
        y.backward(grad)
        return middle - start, time.perf_counter() - middle

    return run, forward, backward


def _point(calls: Sequence[Operation], seconds: float, speeds: Speeds) -> tuple[float, float]:
    """Return (median bytes that a call moves, seconds of a call beyond its operation)."""
    known = sum(call.calls * speeds.operation(call.name, call.dtype, call.size) for call in calls)
    count = sum(call.calls for call in calls)
    return median_bytes(calls), max(_LEAST_OF_CALL, (seconds - known) / count)


# -- host time of an engine, by unit and by step -----------------------------------------------------------------------


_SMALL_WIDTH, _SMALL_TOKENS = 64, 16
_COUNTS = (8, 40)  # blocks
_ENGINE_ROUNDS, _STEPS = 3, 16  # few and many blocks in turn, because the speed of a CPU varies over seconds


def host_curves(measured: Measured, world: World) -> dict[str, Curve]:
    """Return host times by name: "shared_memory unit 3" for a unit at stage 3, "shared_memory step 3" for a step.

    They are the measured time of a step with many small blocks minus the prediction from `measured`.
    """
    found = {}
    transports = ("shared_memory", "sockets") if world.size > 1 else ("solo",)
    for transport in transports:
        for stage in (0, 1, 3):
            rounds = [
                [_lacking(measured, world, transport, stage, count) for count in _COUNTS] for _ in range(_ENGINE_ROUNDS)
            ]
            few, many = map(min, zip(*rounds, strict=True))
            # seconds(n blocks) = step + n x unit: two numbers of blocks give both.
            unit = max(_LEAST_OF_CALL, (many - few) / (_COUNTS[1] - _COUNTS[0]))
            step = max(_LEAST_OF_CALL, few - _COUNTS[0] * unit)
            found[f"{transport} unit {stage}"] = Curve((0.0,), (unit,))
            found[f"{transport} step {stage}"] = Curve((0.0,), (step,))
    return found


def _lacking(measured: Measured, world: World, transport: str, stage: int, count: int) -> float:
    """Return the seconds by which the prediction of a step is too short."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "device": "cpu",
        "optimizer": {"type": "adamw", "params": {}},
        "zero_optimization": {"stage": stage, "units": [str(number) for number in range(count)]},
    }
    config |= {"communication": {"transport": transport}} if world.size > 1 else {}
    batch = (torch.ones(1, _SMALL_TOKENS, _SMALL_WIDTH),)
    # Almost no computing, but as many parameters per block as in most transformers.
    model = nn.Sequential(*(MeasuredBlock(_SMALL_WIDTH) for _ in range(count)))
    blueprint = Blueprint.of(Config.load(config).resolve(world.size), model, world.size)
    run = MetaRun(model, blueprint.units, blueprint.dtypes, "cpu", _mean_square)
    profile = run.profile(batch, 1, 0, writes_gradients(blueprint))
    machine = Machine.measured(measured, world.size, 1e12)
    predicted = estimate(blueprint, machine, profile).step_seconds
    with initialize(model, config, loss_fn=_mean_square) as engine:
        clock = own_clock() if world.size == 1 else time.perf_counter
        times = []
        for _ in range(_STEPS):
            start = clock()
            engine.train_step(batch)
            times.append(clock() - start)
    # The first steps make states and buffers.
    return min(times[2:]) - predicted


def _mean_square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()
