"""Part `ranks` of benchmarks/gpu.sh: two ranks on one device, by gloo, and by NCCL where it lets them.

NCCL refuses two ranks on one GPU in most versions: then a row says so in its words. The losses are compared with those
of one rank that has the whole batch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import _device
import torch.distributed as dist
from _contenders import CONTENDERS
from _gpu_models import work_of
from _gpu_record import Record, one_line
from _largest_job import BudgetResult, BudgetWork, run_budget_job
from _ranks import JobError
from _report import loss_difference

NUM_RANKS = 2
STAGES = (0, 1, 2, 3)
LEAST_SECONDS = 30.0
MOST_SECONDS = 60.0  # of a job: a hang is told, and does not take the part's time
TOLERANCE = 1e-4


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    size = "tiny" if is_rehearsal else "10M"
    whole = replace(work_of(size, NUM_RANKS, False, record.left_seconds), dtype="fp32", warmup=0, steps=3)
    parts = replace(whole, ranks=NUM_RANKS, microbatch=1)
    expected = run_budget_job(CONTENDERS["lowtide-0"], whole, sys.executable, record.folder, None).losses
    device = _device.type_of_device()
    own = dist.get_default_backend_for_device(device)  # NCCL, on a GPU
    backends = [name for name in ("gloo", own) if device in dist.Backend.backend_capability[name]]
    record.note(f"of gloo and NCCL, this torch has for {device}: {', '.join(dict.fromkeys(backends))}")
    if device == "cuda":  # all ranks see one device alone
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    for backend in dict.fromkeys(backends):
        for stage in (3,) if is_rehearsal else STAGES:
            what = f"{backend}, stage {stage}"
            if not record.wants(what):
                continue
            if record.left_seconds < LEAST_SECONDS:
                record.note(f"{what}: no time was left; `benchmarks/gpu.sh ranks --only '{what}'`")
                continue
            work = replace(parts, backend=backend, timeout_seconds=record.job_seconds(MOST_SECONDS))
            with record.measuring(what):
                train(record, backend, stage, work, expected)


def train(record: Record, backend: str, stage: int, work: BudgetWork, expected: list[float]) -> None:
    """A row. That NCCL does not start is no failure; that losses differ is one."""
    found: BudgetResult | None = None
    said = "trained"
    try:
        found = run_budget_job(CONTENDERS[f"lowtide-{stage}"], work, sys.executable, record.folder, None)
    except JobError as error:
        said = f"refused: {one_line(error)}"
    difference = loss_difference([found.losses], expected) if found else None
    record.add(
        "two ranks on one device",
        backend=backend,
        stage=stage,
        outcome=said,
        largest_difference=difference,
        ms_a_step=found.step_seconds * 1e3 if found else None,
    )
    if found is None and backend != "nccl":
        record.fail(f"{backend}, stage {stage}", said)
    if difference is not None and not difference <= TOLERANCE:
        text = f"expected at most {TOLERANCE} (relative) from the losses of one rank, found {difference:.2g}"
        record.fail(f"{backend}, stage {stage}", text)
