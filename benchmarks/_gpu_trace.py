"""Part `trace` of benchmarks/gpu.sh: one of eight simulated ranks on the real device.

The process group is torch's fake one: collectives take no time and give no meaningful values; the shapes, bytes,
streams and kernels of this rank are those of a job of eight. What it shows is the host's part: where the device waits.

[Note: Kernels of blocks]
A kernel belongs to the call of the host that launched it (the same "correlation"), and that call to the operation
around it on its thread. An operation of a forward pass lies in the range of a block; autograd's call of a node has the
"Sequence number" of the operation of the forward that it differentiates (other operations have numbers that mean
nothing). What belongs to no block (collectives, copies, the update) fills gaps, and has none of its own.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import _device
import torch
import torch.distributed as dist
from _gpu_part import Record
from _model import GPT, SIZES, build_batches
from torch import Tensor, nn
from torch.profiler import profile, record_function

import lowtide
from lowtide.comm import native

NUM_RANKS = 8
WARMUP_STEPS = 3
TIMED_STEPS = 5
PROFILED_STEPS = 2
STAGES = (0, 2, 3)
STEP = "step"


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    size, microbatch = ("tiny", 1) if is_rehearsal else ("350M", 4)
    record.note(
        f"GPT {size}, bf16, {microbatch} sequences of {SIZES[size].sequence_length}, {NUM_RANKS} simulated ranks"
    )
    if not _device.records_kernels():
        record.note("the profiler records no kernels of this device: the host's operations stand for them")
    for stage in STAGES:
        what = f"stage {stage}"
        if record.wants(what):
            with record.measuring(what), fake_group():
                trace(record, stage, size, microbatch)


@contextmanager
def fake_group() -> Iterator[None]:
    """This process as one rank of eight."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    devices = dist.Backend.backend_capability["fake"]
    if _device.type_of_device() not in devices:
        devices.append(_device.type_of_device())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        with nullcontext() if _reductions_write() else mock.patch.object(native, "_reduce_scatter", _reduce_zeros):
            yield
    finally:
        dist.destroy_process_group()


_reduce_scatter = native._reduce_scatter


def _reductions_write() -> bool:
    """Where they do not, what was in the memory would be a gradient, and may be not finite."""
    kind = _device.type_of_device()
    found = torch.full((1,), torch.nan, device=kind)
    world = dist.group.WORLD
    assert world is not None
    _reduce_scatter(found, torch.zeros(NUM_RANKS, device=kind), world)
    return not bool(found.isnan())


def _reduce_zeros(output: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work:
    output.zero_()
    return _reduce_scatter(output, given, group)


def trace(record: Record, stage: int, size: str, microbatch: int) -> None:
    _device.forget_memory()
    config = {
        "train_micro_batch_size_per_gpu": microbatch,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "adamw"},
        "steps_per_print": 0,
        "device": _device.config_name(),
    }
    ((tokens, targets),) = build_batches(size, argparse.__file__, 1, microbatch)
    batch = tokens.to(_device.type_of_device()), targets.to(_device.type_of_device())
    torch.manual_seed(0)
    engine = lowtide.initialize(GPT(SIZES[size]), config)
    try:
        milliseconds = timed_steps(engine, batch, lambda: add_memory(record, stage, size, config, engine))
        events = profiled(engine, batch, record.folder / f"trace_stage{stage}.json.gz")
    finally:
        engine.close()
    add_gaps(record, stage, milliseconds, events)


def timed_steps(engine: Any, batch: Any, between: Callable[[], object] | None = None) -> tuple[float, float]:
    """Milliseconds of a step, and until the host has launched all of it: medians. between: after the warm-up."""
    for _ in range(WARMUP_STEPS):
        engine.train_step(batch)
    if between is not None:
        between()
    seconds = []
    for _ in range(TIMED_STEPS):
        _device.synchronize()
        started = time.perf_counter()
        engine.train_step(batch)
        launched = time.perf_counter()
        _device.synchronize()
        seconds.append((time.perf_counter() - started, launched - started))
    whole, until_launched = (statistics.median(one) * 1e3 for one in zip(*seconds, strict=True))
    return whole, until_launched


def profiled(engine: Any, batch: Any, path: Path) -> list[dict[str, Any]]:
    """The events of some steps, written to a file that chrome://tracing and Perfetto open."""
    blocks: Any = engine.module.blocks
    removes = [handle for number, block in enumerate(blocks) for handle in _ranges_of(block, f"{BLOCK}{number}")]
    engine.train_step(batch)
    _device.synchronize()
    with profile(activities=_device.activities(), acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                engine.train_step(batch)
        _device.synchronize()
    for handle in removes:
        handle.remove()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    text = plain.read_text()
    plain.unlink()
    path.write_bytes(gzip.compress(text.encode(), compresslevel=6))
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def _ranges_of(block: nn.Module, name: str) -> list[Any]:
    """Hooks that put a block's forward into a range of that name."""
    open_ranges: list[Any] = []

    def begin(*_: Any) -> None:
        open_ranges.append(record_function(name))
        open_ranges[-1].__enter__()

    def end(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]


def add_memory(record: Record, stage: int, size: str, config: dict[str, Any], engine: Any) -> None:
    """What is reserved beside what is allocated, and beside what the blueprint says."""
    from lowtide.engine.blueprint.blueprint import Blueprint
    from lowtide.engine.blueprint.footprint import MemoryPhase, bytes_of

    kind = _device.type_of_device()
    with torch.device("meta"):
        model = GPT(SIZES[size])
    blueprint = Blueprint.of(lowtide.Config.load(config).resolve(NUM_RANKS), model, NUM_RANKS, device=kind)
    between, most = (bytes_of(blueprint, 0, moment) for moment in (MemoryPhase.BETWEEN_STEPS, MemoryPhase.REDUCED))
    held, found = engine.memory(), _device.Memory.now()
    at_rest = between.parameters + between.gradients + between.optimizer
    record.add(
        "memory in MiB",
        stage=stage,
        predicted_between_steps=_mib(at_rest),
        engine_memory=_mib(held.total_bytes),
        allocated=_mib(found.allocated),
        reserved=_mib(found.reserved),
        predicted_peak=_mib(most.model),
        peak_allocated=_mib(found.peak),
        peak_reserved=_mib(found.peak_reserved),
    )


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / _device.MIB


def add_gaps(record: Record, stage: int, milliseconds: tuple[float, float], events: list[dict[str, Any]]) -> None:
    """A row for the step, and one for the blocks of each direction: medians over blocks and profiled steps."""
    kernels = kernels_of(events, host_as_device=not _device.records_kernels())
    if not kernels:
        record.fail(f"stage {stage}", "expected kernels in the trace, found none")
        return
    waits = host_waits_of(events, STEP)
    start, end = kernels[0].start, max(kernel.end for kernel in kernels)
    record.add(
        "steps",
        stage=stage,
        ms_a_step=milliseconds[0],
        ms_until_launched=milliseconds[1],
        idle_share_while_profiled=sum(idle_times(kernels, start, end)) / (end - start),
        kernels_a_step=len(kernels) // PROFILED_STEPS,
        waits_a_step=len(waits) / PROFILED_STEPS,
        of_these=", ".join(sorted(set(waits))) or None,
    )
    gaps = gaps_of(kernels)
    for is_backward in (False, True):
        of_blocks = [one for one in gaps if one.is_backward == is_backward]
        if not of_blocks:
            record.fail(f"stage {stage}", f"expected blocks in the trace's {_word(is_backward)}, found none")
            continue
        record.add(
            "gaps of a block",
            stage=stage,
            direction=_word(is_backward),
            blocks=len(of_blocks),
            us=statistics.median(one.duration for one in of_blocks),
            idle_us=statistics.median(one.idle for one in of_blocks),
            most_idle_us=max(one.idle for one in of_blocks),
            largest_gap_us=max(one.largest for one in of_blocks),
            gaps=statistics.median(one.number for one in of_blocks),
        )


def _word(is_backward: bool) -> str:
    return "backward" if is_backward else "forward"


# -- gaps between kernels, block by block: arithmetic on the events of a trace ---------------------------------------


BLOCK = "block "
"""A range whose name begins so is a block's, such as "block 3"."""

Event = Mapping[str, Any]
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Kernel:
    """Of the device. block: such as "block 3"; "" for none. Times in microseconds."""

    name: str
    start: float
    end: float
    block: str
    is_backward: bool


@dataclass(frozen=True)
class Gaps:
    """From the first kernel of a block in one direction to the first of what comes next. Microseconds."""

    block: str
    is_backward: bool
    duration: float
    idle: float
    number: int  # of the idle times
    largest: float


def kernels_of(events: Sequence[Event], *, host_as_device: bool = False) -> list[Kernel]:
    """Those of a Chrome trace, by their start. host_as_device: the host's own operations stand for kernels."""
    complete = [event for event in events if event.get("ph") == "X"]
    operations = _Operations([event for event in complete if event.get("cat") == "cpu_op"], complete)
    if host_as_device:
        found = [_kernel(event, *operations.block_of(event)) for event in operations.outermost]
        return sorted(found, key=lambda kernel: kernel.start)
    launches = {
        event["args"]["correlation"]: event
        for event in complete
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in complete:
        if event.get("cat") in _ON_DEVICE:
            launch = launches.get(event.get("args", {}).get("correlation"))
            found.append(_kernel(event, *(("", False) if launch is None else operations.block_of(launch))))
    return sorted(found, key=lambda kernel: kernel.start)


def host_waits_of(events: Sequence[Event], within: str) -> list[str]:
    """What the host called that waits for the device, in ranges of that name, by the names in CUDA's runtime."""
    ranges = [one for one in events if one.get("cat") == "user_annotation" and one.get("name") == within]
    calls = [one for one in events if one.get("cat") in _LAUNCHES and _waits(one["name"])]
    return [
        str(call["name"]) for call in calls if any(one["ts"] <= call["ts"] < one["ts"] + one["dur"] for one in ranges)
    ]


def _waits(name: str) -> bool:
    return "Synchronize" in name or name == "cudaMemcpy"


def _kernel(event: Event, block: str, is_backward: bool) -> Kernel:
    return Kernel(event["name"], event["ts"], event["ts"] + event["dur"], block, is_backward)


class _Operations:
    """The host's operations, thread by thread."""

    def __init__(self, operations: Sequence[Event], complete: Sequence[Event]) -> None:
        ranges = [one for one in complete if one.get("cat") == "user_annotation" and one["name"].startswith(BLOCK)]
        self._ranges = _Nested(ranges)
        self._nested = _Nested(operations)
        self.outermost = [one for one in operations if self._nested.depth(one) == 0]
        self._forward: dict[int, str] = {}
        for operation in operations:
            number = _sequence_number(operation)
            if number >= 0 and not operation["name"].startswith(_NODE) and (block := self._range(operation)):
                self._forward.setdefault(number, block)

    def _range(self, event: Event) -> str:
        around = self._ranges.around(event)
        return str(around[-1]["name"]) if around else ""

    def block_of(self, event: Event) -> tuple[str, bool]:
        """The block that an event of the host belongs to, and whether it is in the backward."""
        if block := self._range(event):
            return block, False
        for operation in self._nested.around(event):
            if operation["name"].startswith(_NODE):
                return self._forward.get(_sequence_number(operation), ""), True
        return "", False


def _sequence_number(operation: Event) -> int:
    return int(operation.get("args", {}).get("Sequence number", -1))


class _Nested:
    """Events of threads, on each of which they lie side by side or one within another."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._threads: dict[Any, list[Event]] = {}
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            self._threads.setdefault(event["tid"], []).append(event)
        self._starts = {tid: [one["ts"] for one in found] for tid, found in self._threads.items()}
        self._parents: dict[int, Event | None] = {}
        for found in self._threads.values():
            stack: list[Event] = []
            for event in found:
                while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                    stack.pop()
                self._parents[id(event)] = stack[-1] if stack else None
                stack.append(event)

    def around(self, event: Event) -> list[Event]:
        """Those in which an event of the same thread begins, the innermost first; of its own kind, itself too."""
        tid, start = event["tid"], event["ts"]
        if tid not in self._threads:
            return []
        index = bisect.bisect_right(self._starts[tid], start) - 1
        found: list[Event] = []
        one = self._threads[tid][index] if index >= 0 else None
        while one is not None:
            if one["ts"] + one["dur"] > start or one is event:
                found.append(one)
            one = self._parents[id(one)]
        return found

    def depth(self, event: Event) -> int:
        return len([one for one in self.around(event) if one is not event])


def idle_times(kernels: Sequence[Kernel], start: float, end: float) -> list[float]:
    """How long no kernel ran, each time, between two times; sorted by their start."""
    found, busy_until = [], start
    for kernel in kernels:
        if kernel.start >= end:
            break
        if kernel.start > busy_until:
            found.append(kernel.start - busy_until)
        busy_until = max(busy_until, kernel.end)
    if end > busy_until:
        found.append(end - busy_until)
    return found


def gaps_of(kernels: Sequence[Kernel]) -> list[Gaps]:
    """Of each run of a block's kernels, in the order of time; the last run ends with its own last kernel."""
    windows: list[tuple[Kernel, float]] = []  # the first kernel of a run, the end of its last
    for kernel in kernels:
        if not kernel.block:
            continue
        if windows and (windows[-1][0].block, windows[-1][0].is_backward) == (kernel.block, kernel.is_backward):
            windows[-1] = (windows[-1][0], max(windows[-1][1], kernel.end))
        else:
            windows.append((kernel, kernel.end))
    found = []
    for number, (first, last_end) in enumerate(windows):
        follows = number + 1 < len(windows) and windows[number + 1][0].is_backward == first.is_backward
        end = windows[number + 1][0].start if follows else last_end
        idle = idle_times(kernels, first.start, max(end, first.start))
        duration = max(end - first.start, 0.0)
        found.append(Gaps(first.block, first.is_backward, duration, sum(idle), len(idle), max(idle, default=0.0)))
    return found
