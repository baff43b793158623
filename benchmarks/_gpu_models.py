"""Part `models` of benchmarks/gpu.sh: tokens/s and peak memory of real sizes beside torch, FSDP2 and DeepSpeed.

Each is a job of its own, trained in bf16 with fp32 weights: autocast for plain torch, a precision policy for FSDP2.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import _device
from _contenders import CONTENDERS
from _gpu_part import Record
from _harness import Contender, JobError, OverBudget, Result, mib
from _model import SIZES
from largest import run_budget_job

CHOSEN = ("single", "fsdp2", "lowtide-0", "lowtide-3", "lowtide-3-states-cpu", "deepspeed-3-cpu")
REHEARSED = ("single", "lowtide-3-nvme")
SHAPES = {"350M": (4, False), "1.3B": (4, True), "3B": (4, True)}  # microbatch, whether blocks are recomputed
LEAST_SECONDS = 40.0
MOST_SECONDS = 150.0  # of a job: one that hangs leaves time for others
NO_LIMIT = 1 << 50


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    shapes, names = ({"tiny": (1, True)}, REHEARSED) if is_rehearsal else (SHAPES, CHOSEN)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if not has_deepspeed:
        record.note("DeepSpeed is not installed (deepspeed): it has no numbers here")
    for size, (microbatch, recompute_blocks) in shapes.items():
        for contender in [CONTENDERS[name] for name in names]:
            what = f"{size} {contender.name}"
            if (contender.needs_deepspeed and not has_deepspeed) or not record.wants(what, LEAST_SECONDS):
                continue
            job = {
                "size": size,
                "num_layers": SIZES[size].num_layers,
                "sequence_length": None,
                "ranks": 1,
                "threads": _device.num_threads(),
                "microbatch": microbatch,
                "warmup": 0 if is_rehearsal else 3,
                "steps": 2 if is_rehearsal else 5,
                "device": _device.type_of_device(),
                "dtype": "bf16",
                "recompute_blocks": recompute_blocks,
                "budget_bytes": _device.total_bytes() or NO_LIMIT,
                "timeout": record.job_seconds(MOST_SECONDS),
            }
            with record.measuring(what):
                train(record, contender, job)


def train(record: Record, contender: Contender, job: dict[str, Any]) -> None:
    """Add a row, also for a model that needs more memory than there is."""
    found: Result | None = None
    try:
        found = run_budget_job(contender, job, sys.executable, record.folder, None)
    except OverBudget:
        pass
    except JobError as error:
        record.fail(f"{job['size']} {contender.name}", str(error))
        return
    shape = SIZES[job["size"]]
    tokens = job["microbatch"] * shape.sequence_length
    record.add(
        "models, bf16, one rank",
        model=job["size"],
        parameters_M=shape.num_parameters / 1e6,
        microbatch=f"{job['microbatch']} x {shape.sequence_length}",
        recomputed="blocks" if job["recompute_blocks"] else "nothing",
        contender=contender.label,
        tokens_per_s=tokens / found.step_seconds if found else "out of memory",
        ms_a_step=found.step_seconds * 1e3 if found else None,
        peak_reserved_MiB=mib(found.peak_bytes) if found else None,
        loss=found.losses[-1] if found else None,
    )
