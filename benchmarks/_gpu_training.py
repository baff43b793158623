"""Parts `training` and `compiled` of benchmarks/gpu.sh: one rank, and compiled blocks beside plain ones.

Part `training` trains at each stage, precision and placement, beside the same on the CPU. The host's waits are those of
steps after the first ones, whose results nobody reads meanwhile. Part `compiled` counts torch.compile's graphs after
the first step and at its end: a graph more is a recompile. Graph breaks are those that torch's compiler counts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import _device
import torch
from _gpu_part import Record
from _harness import loss_difference
from _model import GPT, SEED, SIZES, build_batches, build_model
from torch._dynamo.utils import counters

import lowtide

DTYPES = ("fp32", "bf16", "fp16")
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # relative, of a loss to the CPU's in the same precision

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Length:
    """Of a training: the model, and its steps by what is done with them."""

    size: str = "10M"
    rows: int = 4  # sequences of a step
    warmup: int = 3  # the first ones learn shapes, compile kernels and fill caches
    counted: int = 3  # of whose waits a line is written
    timed: int = 6

    @property
    def num_steps(self) -> int:
        return self.warmup + self.counted + self.timed


REHEARSED = Length("tiny", 2, 2, 1, 1)


@dataclass(frozen=True)
class Case:
    """A config without its precision. zero: of zero_optimization, "PATH" for a folder; numbers: cases of the same
    numbers have the same losses.
    """

    name: str
    stage: int
    zero: Section = field(default_factory=dict)
    activations: Section = field(default_factory=dict)
    accumulation: int = 1
    clip: float = 1.0
    dtypes: tuple[str, ...] = DTYPES
    numbers: str = "plain"

    def config(self, dtype: str, device: str, rows: int, folder: str) -> dict[str, Any]:
        section = {
            "train_micro_batch_size_per_gpu": rows // self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "steps_per_print": 0,
            "optimizer": {"type": "adamw", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            "activation_checkpointing": dict(self.activations),
            "device": device,
        }
        if dtype == "bf16":
            section["bf16"] = {"enabled": True}
        if dtype == "fp16":
            section["fp16"] = {"enabled": True, "initial_scale_power": 8}  # no step is skipped on the one alone
        filled: dict[str, Any] = _with_folder(section, folder)
        return filled


def _with_folder(value: Any, folder: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_folder(one, folder) for key, one in value.items()}
    return folder if value == "PATH" else value


def _place(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "PATH"} if device == "nvme" else {}), **more}


def _states(device: str, stage: int, overlap: str) -> Case:
    name = f"stage {stage}, states {device}, overlap {overlap}"
    if overlap == "delayed":
        zero = {"offload_optimizer": _place(device, overlap=overlap, delay_after_steps=1)}
        return Case(name, stage, zero, numbers="delayed")
    return Case(name, stage, {"offload_optimizer": _place(device, overlap=overlap)})


def _offloads(device: str) -> list[Case]:
    place = _place(device)
    activations = {"every": 1, "offload": _place(device, min_bytes=1024)}
    return [
        *(_states(device, 3, overlap) for overlap in ("none", "speculative", "delayed")),
        Case(f"stage 3, parameters {device}", 3, {"offload_param": place}),
        Case(f"stage 3, states and parameters {device}", 3, {"offload_optimizer": place, "offload_param": place}),
        Case(f"stage 3, activations {device}", 3, activations=activations),
    ]


IN_BACKWARD = {"update_in_backward": True}  # which neither clips nor scales
PLAIN = [Case(f"stage {stage}", stage) for stage in (0, 1, 2, 3)]
OTHERS = [
    Case("stage 2, accumulation 2", 2, accumulation=2, numbers="accumulation"),
    Case("stage 3, update in backward", 3, IN_BACKWARD, clip=0.0, dtypes=("fp32", "bf16"), numbers="not clipped"),
    *_offloads("cpu"),
    *_offloads("nvme"),
    _states("cpu", 1, "none"),
    Case("stage 3, half of the states cpu", 3, {"offload_optimizer": _place("cpu", ratio=0.5)}),
]


@dataclass(frozen=True)
class Trained:
    """What a training gave. waits: of the counted steps, each as its place."""

    losses: list[float]
    milliseconds: float
    waits: list[str]
    memory: _device.Memory


def train(case: Case, dtype: str, device: str, length: Length, folder: str) -> Trained:
    """device: as a config names it. Results are read when all steps were made."""
    _device.forget_memory()
    kind = _device.type_of_device() if device != "cpu" else "cpu"  # a batch that is not there yet would be waited for
    drawn = build_batches(length.size, argparse.__file__, length.num_steps, length.rows)
    batches = iter([(tokens.to(kind), targets.to(kind)) for tokens, targets in drawn])
    engine = lowtide.initialize(build_model(length.size, tied=False), case.config(dtype, device, length.rows, folder))
    try:
        losses = [engine.train_step(next(batches)).loss for _ in range(length.warmup)]
        with _device.host_waits() as waits:
            losses += [engine.train_step(next(batches)).loss for _ in range(length.counted)]
        seconds = []
        for batch in batches:
            _device.synchronize()
            started = time.perf_counter()
            losses.append(engine.train_step(batch).loss)
            _device.synchronize()
            seconds.append(time.perf_counter() - started)
        values = [float(loss) for loss in losses]
        return Trained(values, statistics.median(seconds) * 1e3, waits, _device.Memory.now())
    finally:
        engine.close()


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    length = REHEARSED if is_rehearsal else Length()
    torch.backends.cuda.matmul.allow_tf32 = False  # it would be the difference from the CPU
    record.note(f"GPT {length.size}, {length.rows} sequences a step, {length.num_steps} steps")

    places: dict[str, list[float]] = {}

    @functools.cache
    def on_cpu(numbers: str, dtype: str) -> list[float]:
        case = next(one for one in [*PLAIN, *OTHERS] if one.numbers == numbers)
        return train(case, dtype, "cpu", length, folder).losses

    with tempfile.TemporaryDirectory(prefix="offload-", dir=record.folder) as folder:
        for number, case in enumerate([*PLAIN, *OTHERS]):
            # In a rehearsal each case has one precision, the next one the next.
            for dtype in [case.dtypes[number % len(case.dtypes)]] if is_rehearsal else case.dtypes:
                what = f"{case.name}, {dtype}"
                if not record.wants(what):
                    continue
                with record.measuring(what):
                    found = train(case, dtype, _device.config_name(), length, folder)
                    add(record, case, dtype, length, found, on_cpu(case.numbers, dtype))
                    for place, number in Counter(found.waits).items():
                        places.setdefault(place, []).append(number / length.counted)
    for place, numbers in sorted(places.items(), key=lambda one: -max(one[1])):
        record.add("waits of the host", place=place, trainings=len(numbers), most_a_step=max(numbers))


def add(record: Record, case: Case, dtype: str, length: Length, found: Trained, expected: list[float]) -> None:
    """A row, and a failure where the losses are not the CPU's."""
    difference = loss_difference([found.losses], expected)
    record.add(
        "one rank beside the CPU",
        case=case.name,
        dtype=dtype,
        loss=found.losses[-1],
        largest_difference=difference,
        waits_a_step=round(len(found.waits) / length.counted, 2),
        ms_a_step=found.milliseconds,
        peak_MiB=_mib(found.memory.peak),
        reserved_MiB=_mib(found.memory.peak_reserved),
    )
    if difference is None or not difference <= TOLERANCES[dtype]:
        found_text = f"expected at most {TOLERANCES[dtype]} (relative) from the CPU's losses, found {difference:.2g}"
        record.fail(f"{case.name}, {dtype}", found_text)


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / _device.MIB


# -- part compiled ---------------------------------------------------------------------------------------------------


COMPILED_STAGES = (0, 3)
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Compiled:
    """first_seconds: of the step that compiles. graphs: after the first step and after the last one."""

    losses: list[float]
    first_seconds: float
    milliseconds: float
    graphs: tuple[int, int]
    breaks: int
    peak_bytes: int | None


def measure_compiled(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    size, microbatch, timed_steps = ("tiny", 1, 1) if is_rehearsal else ("350M", 4, 10)
    backend = "eager" if is_rehearsal else "inductor"
    record.note(f"GPT {size}, bf16, {microbatch} x {SIZES[size].sequence_length} tokens, torch.compile {backend}")
    for stage in COMPILED_STAGES:
        what = f"stage {stage}"
        if record.wants(what):
            with record.measuring(what):
                plain = train_compiled(stage, size, microbatch, timed_steps, None)
                add_compiled(record, stage, "plain", plain, plain)
                add_compiled(
                    record,
                    stage,
                    "compiled blocks",
                    train_compiled(stage, size, microbatch, timed_steps, backend),
                    plain,
                )


def train_compiled(stage: int, size: str, microbatch: int, timed_steps: int, backend: str | None) -> Compiled:
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
        return Compiled(
            losses=[float(loss) for loss in losses],
            first_seconds=seconds[0],
            milliseconds=statistics.median(seconds[WARMUP_STEPS:]) * 1e3,
            graphs=(graphs[0], graphs[-1]),
            breaks=sum(counters["graph_break"].values()),
            peak_bytes=_device.Memory.now().peak,
        )
    finally:
        engine.close()


def add_compiled(record: Record, stage: int, how: str, found: Compiled, plain: Compiled) -> None:
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
    if difference is None or not difference <= TOLERANCES["bf16"]:
        problems.append(f"losses differ by {difference:.2g}, expected at most {TOLERANCES['bf16']} (relative)")
    if problems:
        record.fail(f"stage {stage}, {how}", ", ".join(problems))
