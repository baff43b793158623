"""Part `models` of benchmarks/gpu.sh: tokens/s and peak memory of real sizes, beside plain torch, FSDP2, DeepSpeed.

Each is a job of its own, trained in bf16 with fp32 weights: autocast for plain torch, a precision policy for FSDP2.
"""

from __future__ import annotations

import importlib.util
import sys

import _device
from _contenders import CONTENDERS, Contender
from _gpu_record import Record
from _largest_job import BudgetResult, BudgetWork, run_budget_job
from _model import SIZES
from _ranks import JobError, OverBudget

CHOSEN = ("single", "fsdp2", "lowtide-0", "lowtide-3", "lowtide-3-states-cpu", "deepspeed-3-cpu")
REHEARSED = ("single",)  # parts `largest` and `ranks` rehearse lowtide's trainer
SHAPES = {"350M": (4, False), "1.3B": (4, True), "3B": (4, True)}  # microbatch, whether blocks are recomputed
WARMUP_STEPS = 3
LEAST_SECONDS = 40.0
MOST_SECONDS = 150.0  # of a job: one that hangs leaves time for others
NO_LIMIT = 1 << 50


def work_of(size: str, microbatch: int, recompute_blocks: bool, limit_seconds: float) -> BudgetWork:
    is_rehearsal = _device.is_rehearsal()
    return BudgetWork(
        size=size,
        num_layers=SIZES[size].num_layers,
        ranks=1,
        threads=_device.num_threads(),
        microbatch=microbatch,
        warmup=0 if is_rehearsal else WARMUP_STEPS,
        steps=2 if is_rehearsal else 5,
        device=_device.type_of_device(),
        recompute_blocks=recompute_blocks,
        budget_bytes=_device.total_bytes() or NO_LIMIT,
        timeout_seconds=limit_seconds,
        dtype="bf16",
    )


def measure(record: Record) -> None:
    shapes = {"tiny": (1, True)} if _device.is_rehearsal() else SHAPES
    names = REHEARSED if _device.is_rehearsal() else CHOSEN
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if not has_deepspeed:
        record.note("DeepSpeed is not installed (deepspeed): it has no numbers here")
    for size, (microbatch, recompute_blocks) in shapes.items():
        for contender in [CONTENDERS[name] for name in names]:
            what = f"{size} {contender.name}"
            if not record.wants(what) or (contender.kind == "deepspeed" and not has_deepspeed):
                continue
            if record.left_seconds < LEAST_SECONDS:
                record.note(f"{what}: no time was left; `benchmarks/gpu.sh models --only '{what}'`")
                continue
            work = work_of(size, microbatch, recompute_blocks, record.job_seconds(MOST_SECONDS))
            with record.measuring(what):
                train(record, contender, work)


def train(record: Record, contender: Contender, work: BudgetWork) -> None:
    """A row; what needs more memory than there is has one too."""
    found: BudgetResult | None = None
    try:
        found = run_budget_job(contender, work, sys.executable, record.folder, None)
    except OverBudget:
        pass
    except JobError as error:
        record.fail(f"{work.size} {contender.name}", str(error))
        return
    shape = SIZES[work.size]
    tokens = work.microbatch * shape.sequence_length
    peak_bytes = found.peak_bytes if found else None
    record.add(
        "models, bf16, one rank",
        model=work.size,
        parameters_M=shape.num_parameters / 1e6,
        microbatch=f"{work.microbatch} x {shape.sequence_length}",
        recomputed="blocks" if work.recompute_blocks else "nothing",
        contender=contender.label,
        tokens_per_s=tokens / found.step_seconds if found else "out of memory",
        ms_a_step=found.step_seconds * 1e3 if found else None,
        peak_reserved_MiB=None if peak_bytes is None else peak_bytes / _device.MIB,
        loss=found.losses[-1] if found else None,
    )
