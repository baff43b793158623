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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import _device
import torch
import torch.distributed as dist
from _gpu_gaps import BLOCK, gaps_of, host_waits_of, idle_times, kernels_of
from _gpu_record import Record
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
        for _ in range(WARMUP_STEPS):
            engine.train_step(batch)
        add_memory(record, stage, size, config, engine)
        seconds = []
        for _ in range(TIMED_STEPS):
            _device.synchronize()
            started = time.perf_counter()
            engine.train_step(batch)
            launched = time.perf_counter()
            _device.synchronize()
            seconds.append((time.perf_counter() - started, launched - started))
        events = profiled(engine, batch, record.folder / f"trace_stage{stage}.json.gz")
    finally:
        engine.close()
    add_gaps(record, stage, [statistics.median(one) * 1e3 for one in zip(*seconds, strict=True)], events)


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
    from lowtide.engine.blueprint import Blueprint
    from lowtide.engine.footprint import Moment, bytes_of

    kind = _device.type_of_device()
    with torch.device("meta"):
        model = GPT(SIZES[size])
    blueprint = Blueprint.of(lowtide.Config.load(config).resolve(NUM_RANKS), model, NUM_RANKS, device=kind)
    between, most = (bytes_of(blueprint, 0, moment) for moment in (Moment.BETWEEN_STEPS, Moment.REDUCED))
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


def add_gaps(record: Record, stage: int, milliseconds: list[float], events: list[dict[str, Any]]) -> None:
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
