"""Part `largest` of benchmarks/gpu.sh: the largest model in the device's memory, with each offload.

It is the search of largest.py, contender by contender. Each begins at the number of layers that arithmetic gives, and
no model is tried whose offloaded state is more than the host, or the drive of the folder, has room for.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import _device
import largest
import psutil
from _gpu_record import Record
from _model import sized
from rich.console import Console

SIZE = "1.3B"
BYTES_OF_PARAMETER = 16  # of AdamW's states, weights and gradients with bf16; what is offloaded is not with the model
ROOM_SHARE = 0.75  # of what is free on the host, or the drive
LEAST_SECONDS = 60.0
MOST_SECONDS = 170.0  # of a try, so that a slow one leaves time for the next contender


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
REHEARSED = ("lowtide-3-nvme",)


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    size = "tiny" if is_rehearsal else SIZE
    for placement in PLACEMENTS:
        name = placement.contender
        if not record.wants(name) or (is_rehearsal and name not in REHEARSED):
            continue
        if record.left_seconds < LEAST_SECONDS:
            record.note(f"{name}: no time was left; `benchmarks/gpu.sh largest --only {name}`")
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
    arguments += ["--timeout", str(record.job_seconds(MOST_SECONDS)), "--offload-folder", str(record.folder)]
    runner = largest.Runner(largest.parse_arguments(arguments), Console(width=140))
    runner.run()
    (row,) = runner.found.rows
    found = row.largest
    for one in row.tries:
        peak = "more than there is" if one.peak_bytes is None else one.peak_bytes / _device.MIB
        record.add("models tried", contender=placement.contender, layers=one.num_layers, peak_MiB=peak)
    record.add(
        "the largest model",
        contender=row.contender.label,
        layers=found.num_layers if found else 0,
        parameters_M=found.num_parameters / 1e6 if found else None,
        peak_MiB=found.peak_bytes / _device.MIB if found and found.peak_bytes is not None else None,
        tokens_per_s=runner.found.tokens_per_second(row.own) if row.own else None,
        bound_by=room if found and found.num_layers == most else "the device",
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
