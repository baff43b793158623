"""Part `compiled` of benchmarks/gpu.sh: blocks that torch.compile has compiled beside plain ones, at stages 0 and 3.

Graphs are counted after the first step and at its end: a graph more is a recompile. Graph breaks are those that
torch's compiler counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import _device
import torch
from _gpu_record import Record
from _model import GPT, SEED, SIZES, build_batches
from _report import loss_difference
from torch._dynamo.utils import counters

import lowtide

STAGES = (0, 3)
TOLERANCE = 2e-2  # relative, of a loss in bf16
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Trained:
    """first_seconds: of the step that compiles. graphs: after the first step and after the last one."""

    losses: list[float]
    first_seconds: float
    milliseconds: float
    graphs: tuple[int, int]
    breaks: int
    peak_bytes: int | None


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    size, microbatch, timed_steps = ("tiny", 1, 1) if is_rehearsal else ("350M", 4, 10)
    backend = "eager" if is_rehearsal else "inductor"
    record.note(f"GPT {size}, bf16, {microbatch} x {SIZES[size].sequence_length} tokens, torch.compile {backend}")
    for stage in STAGES:
        what = f"stage {stage}"
        if record.wants(what):
            with record.measuring(what):
                plain = train(stage, size, microbatch, timed_steps, None)
                add(record, stage, "plain", plain, plain)
                add(record, stage, "compiled blocks", train(stage, size, microbatch, timed_steps, backend), plain)


def train(stage: int, size: str, microbatch: int, timed_steps: int, backend: str | None) -> Trained:
    """backend: of torch.compile; None: nothing is compiled."""
    torch._dynamo.reset()
    counters.clear()
    _device.forget_memory()
    torch.manual_seed(SEED)
    model = GPT(SIZES[size])
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend)
    config = {
        "train_micro_batch_size_per_gpu": microbatch,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "adamw"},
        "steps_per_print": 0,
        "device": _device.config_name(),
    }
    engine = lowtide.initialize(model, config)
    try:
        batches = build_batches(size, argparse.__file__, WARMUP_STEPS + timed_steps, microbatch)
        losses, seconds, graphs = [], [], []
        for batch in batches:
            _device.synchronize()
            started = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's compiler, about itself
                losses.append(engine.train_step(batch).loss)
            _device.synchronize()
            seconds.append(time.perf_counter() - started)
            graphs.append(int(counters["stats"]["unique_graphs"]))
        return Trained(
            losses=[float(loss) for loss in losses],
            first_seconds=seconds[0],
            milliseconds=statistics.median(seconds[WARMUP_STEPS:]) * 1e3,
            graphs=(graphs[0], graphs[-1]),
            breaks=sum(counters["graph_break"].values()),
            peak_bytes=_device.Memory.now().peak,
        )
    finally:
        engine.close()


def add(record: Record, stage: int, how: str, found: Trained, plain: Trained) -> None:
    """A row; a failure where a graph is compiled anew or breaks, or the losses are others."""
    difference = loss_difference([found.losses], plain.losses)
    cells: dict[str, Any] = {
        "stage": stage,
        "blocks": how,
        "first_step_s": found.first_seconds,
        "ms_a_step": found.milliseconds,
        "x_plain": found.milliseconds / plain.milliseconds,
        "graphs": found.graphs[0],
        "recompiles": found.graphs[1] - found.graphs[0],
        "graph_breaks": found.breaks,
        "largest_difference": difference,
        "peak_MiB": None if found.peak_bytes is None else found.peak_bytes / _device.MIB,
    }
    record.add("compiled blocks, bf16, one rank", **cells)
    problems = [f"{number} {what}" for what in ("recompiles", "graph_breaks") if (number := cells[what])]
    if difference is None or not difference <= TOLERANCE:
        problems.append(f"losses differ by {difference:.2g}, expected at most {TOLERANCE} (relative)")
    if problems:
        record.fail(f"stage {stage}, {how}", ", ".join(problems))
