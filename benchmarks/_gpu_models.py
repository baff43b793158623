"""Parts `models` and `largest` of benchmarks/gpu.sh: models of real sizes, and the largest in the device's memory.

Part `models` has tokens/s and peak memory beside plain torch, FSDP2 and DeepSpeed. Each is a job of its own, trained in
bf16 with fp32 weights: autocast for plain torch, a precision policy for FSDP2. Part `largest` is the search of
largest.py, contender by contender. Each begins at the number of layers that arithmetic gives, and no model is tried
whose offloaded state is more than the host, or the drive of the folder, has room for.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass

import _device
import largest
import psutil
from _contenders import CONTENDERS
from _gpu_part import Record
from _harness import Contender, JobError, OverBudget, Result
from _model import SIZES, sized
from largest import BudgetWork, run_budget_job
from rich.console import Console

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
        timeout=limit_seconds,
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
            if (contender.needs_deepspeed and not has_deepspeed) or not record.wants(what, LEAST_SECONDS):
                continue
            work = work_of(size, microbatch, recompute_blocks, record.job_seconds(MOST_SECONDS))
            with record.measuring(what):
                train(record, contender, work)


def train(record: Record, contender: Contender, work: BudgetWork) -> None:
    """A row; what needs more memory than there is has one too."""
    found: Result | None = None
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


# -- part largest ----------------------------------------------------------------------------------------------------


SIZE = "1.3B"
BYTES_OF_PARAMETER = 16  # of AdamW's states, weights and gradients with bf16; what is offloaded is not with the model
ROOM_SHARE = 0.75  # of what is free on the host, or the drive
LEAST_SECONDS_OF_SEARCH = 60.0
MOST_SECONDS_OF_TRY = 170.0  # so that a slow one leaves time for the next contender


@dataclass(frozen=True)
class Placement:
    """Bytes of a parameter with the model at least, and where the rest of the 16 is."""

    contender: str
    on_device: float
    on_host: float = 0.0
    in_files: float = 0.0


PLACEMENTS = (
    Placement("lowtide-3", BYTES_OF_PARAMETER),
    Placement("lowtide-3-states-cpu", 2, on_host=12 + 4),  # gradients leave too
    Placement("fsdp2", BYTES_OF_PARAMETER),
    Placement("lowtide-3-states-nvme", 2, in_files=12),
    Placement("lowtide-3-nvme", 0.5, in_files=14),
    Placement("lowtide-3-least", 0.5, in_files=14),
    Placement("single", BYTES_OF_PARAMETER),
)
REHEARSED_PLACEMENTS = ("lowtide-3-nvme",)


def measure_largest(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    size = "tiny" if is_rehearsal else SIZE
    for placement in PLACEMENTS:
        name = placement.contender
        if (is_rehearsal and name not in REHEARSED_PLACEMENTS) or not record.wants(name, LEAST_SECONDS_OF_SEARCH):
            continue
        with record.measuring(name):
            search(record, placement, size)


def search(record: Record, placement: Placement, size: str) -> None:
    """A row with what was found, and one for each model that was tried."""
    is_rehearsal = _device.is_rehearsal()
    budget_bytes = (64 << 20) if is_rehearsal else _device.total_bytes() or 0
    per_layer = sized(size, 2).num_parameters - sized(size, 1).num_parameters
    most, room = room_for(record, placement, per_layer)
    first = 1 if is_rehearsal else max(1, int(0.8 * budget_bytes / (placement.on_device * per_layer)))
    most = 1 if is_rehearsal else min(most, 1024)
    arguments = ["--device", _device.type_of_device(), "--size", size, "--contenders", placement.contender]
    arguments += ["--budget-mib", str(budget_bytes // _device.MIB), "--dtype", "bf16", "--recompute-blocks"]
    arguments += ["--start-layers", str(min(first, most)), "--max-layers", str(most), "--resolution", "0.1"]
    arguments += ["--ranks", "1", "--threads", str(_device.num_threads()), "--steps", "2", "--timed-steps", "3"]
    arguments += ["--timeout", str(record.job_seconds(MOST_SECONDS_OF_TRY)), "--offload-folder", str(record.folder)]
    searching = largest.Search(largest.parse_arguments(arguments), Console(width=140))
    searching.run()
    (row,) = searching.rows
    found = row.largest
    for one in row.tries:
        peak = "more than there is" if one.peak_bytes is None else one.peak_bytes / _device.MIB
        record.add("models tried", contender=placement.contender, layers=one.amount, peak_MiB=peak)
    record.add(
        "the largest model",
        contender=row.contender.label,
        layers=found.amount if found else 0,
        parameters_M=found.num_parameters / 1e6 if found else None,
        peak_MiB=found.peak_bytes / _device.MIB if found and found.peak_bytes is not None else None,
        tokens_per_s=searching.tokens_per_second(row.own) if row.own else None,
        bound_by=room if found and found.amount == most else "the device",
    )
    if row.failure:
        record.fail(placement.contender, row.failure)


def room_for(record: Record, placement: Placement, per_layer: int) -> tuple[int, str]:
    """The most layers whose offloaded state has room, and what that room is."""
    rooms = {
        "host memory": (psutil.virtual_memory().available, placement.on_host),
        "the drive": (shutil.disk_usage(record.folder).free, placement.in_files),
    }
    most = {what: int(ROOM_SHARE * room / (each * per_layer)) for what, (room, each) in rooms.items() if each}
    if not most:
        return 1 << 20, "the device"
    what = min(most, key=lambda one: most[one])
    return max(1, most[what]), what
