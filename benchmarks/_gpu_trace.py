"""Part `trace` of benchmarks/gpu.sh: one of eight simulated ranks on the real device.

The process group is torch's fake one: collectives take no time and give no meaningful values; the shapes, bytes,
streams and kernels of this rank are those of a job of eight. What it shows is the host's part: where the device waits.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import _device
import torch
import torch.distributed as dist
from _gpu_part import Record
from _model import GPT, SIZES, build_batches
from torch import Tensor
from torch.profiler import profile, record_function

import lowtide
from lowtide.comm import native

NUM_RANKS = 8
WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 5, 2
STAGES = (0, 2, 3)
STEP = "step"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]


def measure(record: Record) -> None:
    size, microbatch = ("tiny", 1) if _device.is_rehearsal() else ("350M", 4)
    length = SIZES[size].sequence_length
    record.note(f"GPT {size}, bf16, {microbatch} sequences of {length}, {NUM_RANKS} simulated ranks")
    if not _device.records_kernels():
        record.note("the profiler records no kernels of this device: the host's operations stand for them")
    for stage in STAGES:
        what = f"stage {stage}"
        if record.wants(what):
            with record.measuring(what), fake_group():
                trace(record, stage, size, microbatch)


@contextmanager
def fake_group() -> Iterator[None]:
    """Make this process one rank of eight."""
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
    """Return whether reductions write their output. Else old memory would be a gradient, and may be not finite."""
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
        for _ in range(WARMUP_STEPS):
            engine.train_step(batch)
        milliseconds = timed_steps(engine, batch)
        events = profiled(engine, batch, record.folder / f"trace_stage{stage}.json.gz")
    finally:
        engine.close()
    add_step(record, stage, milliseconds, events)


def timed_steps(engine: lowtide.Engine, batch: Any) -> tuple[float, float]:
    """Return the milliseconds of a step, and until the host has launched all of it: medians."""
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


def profiled(engine: lowtide.Engine, batch: Any, path: Path) -> list[Event]:
    """Return the events of some steps, and write them to a file that chrome://tracing and Perfetto open."""
    with profile(activities=_device.activities(), acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                engine.train_step(batch)
        _device.synchronize()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    text = plain.read_text()
    plain.unlink()
    path.write_bytes(gzip.compress(text.encode(), compresslevel=6))
    events: list[Event] = json.loads(text)["traceEvents"]
    return events


def add_step(record: Record, stage: int, milliseconds: tuple[float, float], events: Sequence[Event]) -> None:
    kernels = kernels_of(events, _ON_DEVICE if _device.records_kernels() else ("cpu_op",))
    if not kernels:
        record.fail(f"stage {stage}", "expected kernels in the trace, found none")
        return
    waits = host_waits_of(events, STEP)
    record.add(
        "steps",
        stage=stage,
        ms_a_step=milliseconds[0],
        ms_until_launched=milliseconds[1],
        idle_share_while_profiled=idle_share(kernels),
        kernels_a_step=len(kernels) // PROFILED_STEPS,
        waits_a_step=len(waits) / PROFILED_STEPS,
        of_these=", ".join(sorted(set(waits))) or None,
    )


def kernels_of(events: Sequence[Event], categories: Sequence[str]) -> list[tuple[float, float]]:
    """Return start and end of the kernels of a Chrome trace in microseconds, by their start."""
    found = [one for one in events if one.get("ph") == "X" and one.get("cat") in categories]
    return sorted((one["ts"], one["ts"] + one["dur"]) for one in found)


def idle_share(kernels: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end in which no kernel runs."""
    begin = busy_until = kernels[0][0]
    idle = 0.0
    for start, end in kernels:
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    return idle / (busy_until - begin)


def host_waits_of(events: Sequence[Event], within: str) -> list[str]:
    """Return the CUDA calls that wait for the device inside ranges of a name."""
    ranges = [one for one in events if one.get("cat") == "user_annotation" and one.get("name") == within]
    return [
        str(call["name"])
        for call in events
        if call.get("cat") in _LAUNCHES
        and ("Synchronize" in call["name"] or call["name"] == "cudaMemcpy")
        and any(one["ts"] <= call["ts"] < one["ts"] + one["dur"] for one in ranges)
    ]
