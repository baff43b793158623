"""Part `training` of benchmarks/gpu.sh: one rank at each stage, precision and placement, beside the same on the CPU."""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import _device
import torch
from _contenders import with_folder
from _gpu_part import Record
from _harness import loss_difference, mib
from _model import build_batches, build_model

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
    timed: int = 9

    @property
    def num_steps(self) -> int:
        return self.warmup + self.timed


REHEARSED = Length("tiny", 2, 2, 2)


@dataclass(frozen=True)
class Case:
    """A config without its precision. zero: of zero_optimization, "FOLDER" for a folder; numbers: cases of the same
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
    compiles_blocks: bool = False

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
        filled: dict[str, Any] = with_folder(section, folder)
        return filled


def _place(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "FOLDER"} if device == "nvme" else {}), **more}


def _states(device: str, stage: int, overlap: str) -> Case:
    delay = {"delay_after_steps": 1} if overlap == "delayed" else {}
    zero = {"offload_optimizer": _place(device, overlap=overlap, **delay)}
    numbers = "delayed" if overlap == "delayed" else "plain"
    return Case(f"stage {stage}, states {device}, overlap {overlap}", stage, zero, numbers=numbers)


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
CASES = [
    *(Case(f"stage {stage}", stage) for stage in (0, 1, 2, 3)),
    Case("stage 2, accumulation 2", 2, accumulation=2, numbers="accumulation"),
    Case("stage 3, update in backward", 3, IN_BACKWARD, clip=0.0, dtypes=("fp32", "bf16"), numbers="not clipped"),
    *_offloads("cpu"),
    *_offloads("nvme"),
    _states("cpu", 1, "none"),
    Case("stage 3, half of the states cpu", 3, {"offload_optimizer": _place("cpu", ratio=0.5)}),
    *(Case(f"stage {stage}, compiled blocks", stage, dtypes=("bf16",), compiles_blocks=True) for stage in (0, 3)),
]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    milliseconds: float
    memory: _device.Memory


def train(case: Case, dtype: str, device: str, length: Length, folder: str) -> Trained:
    """Train on a device of lowtide's config. Results are read when all steps were made."""
    _device.forget_memory()
    kind = _device.type_of_device() if device != "cpu" else "cpu"  # a batch that is not there yet would be waited for
    drawn = build_batches(length.size, argparse.__file__, length.num_steps, length.rows)
    batches = iter([(tokens.to(kind), targets.to(kind)) for tokens, targets in drawn])
    model = build_model(length.size)
    if case.compiles_blocks and device != "cpu":
        for block in model.blocks:
            block.compile(backend="eager" if _device.is_rehearsal() else "inductor")
    engine = lowtide.initialize(model, case.config(dtype, device, length.rows, folder))
    try:
        with warnings.catch_warnings():
            if case.compiles_blocks:
                warnings.simplefilter("ignore")  # of torch's compiler, about itself
            losses = [engine.train_step(next(batches)).loss for _ in range(length.warmup)]
        seconds = []
        for batch in batches:
            _device.synchronize()
            started = time.perf_counter()
            losses.append(engine.train_step(batch).loss)
            _device.synchronize()
            seconds.append(time.perf_counter() - started)
        milliseconds = statistics.median(seconds) * 1e3
        return Trained([float(loss) for loss in losses], milliseconds, _device.Memory.now())
    finally:
        engine.close()


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    length = REHEARSED if is_rehearsal else Length()
    torch.backends.cuda.matmul.allow_tf32 = False  # it would be the difference from the CPU
    record.note(f"GPT {length.size}, {length.rows} sequences a step, {length.num_steps} steps")

    @functools.cache
    def on_cpu(numbers: str, dtype: str) -> list[float]:
        case = next(one for one in CASES if one.numbers == numbers)
        return train(case, dtype, "cpu", length, folder).losses

    with tempfile.TemporaryDirectory(prefix="offload-", dir=record.folder) as folder:
        for number, case in enumerate(CASES):
            # In a rehearsal each case has one precision, the next one the next.
            for dtype in [case.dtypes[number % len(case.dtypes)]] if is_rehearsal else case.dtypes:
                what = f"{case.name}, {dtype}"
                if not record.wants(what):
                    continue
                with record.measuring(what):
                    found = train(case, dtype, _device.config_name(), length, folder)
                    add(record, case, dtype, found, on_cpu(case.numbers, dtype))


def add(record: Record, case: Case, dtype: str, found: Trained, expected: list[float]) -> None:
    """Add a row, and a failure if the losses differ from the CPU's."""
    difference = loss_difference([found.losses], expected)
    record.add(
        "one rank beside the CPU",
        case=case.name,
        dtype=dtype,
        loss=found.losses[-1],
        largest_difference=difference,
        ms_a_step=found.milliseconds,
        peak_MiB=mib(found.memory.peak),
        reserved_MiB=mib(found.memory.peak_reserved),
    )
    if difference is None or not difference <= TOLERANCES[dtype]:
        found_text = f"expected at most {TOLERANCES[dtype]} (relative) from the CPU's losses, found {difference:.2g}"
        record.fail(f"{case.name}, {dtype}", found_text)
