"""Part `splits` of benchmarks/gpu.sh: layers, sequences and experts that ranks share.

Two ranks on one device, by gloo, and by NCCL where it lets them: their losses are compared with those of one rank that
has it all. And one of eight simulated ranks, as in part `trace`: what a rank's share costs the host and the device,
with collectives that take no time. What ranks compare is left out there, since the simulated ones send nothing: whether
all have the same batch, and, tried once, whether a split model computes what the whole one does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import _device
import torch.distributed as dist
from _gpu_ranks import LEAST_SECONDS, MOST_SECONDS, TOLERANCE
from _gpu_record import Record, one_line
from _gpu_trace import NUM_RANKS as NUM_SIMULATED
from _gpu_trace import TIMED_STEPS, WARMUP_STEPS, fake_group
from _ranks import JobError, environment_of, run_ranks
from _report import loss_difference
from _splits_model import SplitSize, build_batch, build_model
from _splits_worker import config_of, train

import lowtide
from lowtide.engine.model_call import ModelCall
from lowtide.engine.same_batch import SameBatch

NUM_RANKS, ROWS, STEPS = 2, 2, 3
SPLITS = ("tensor", "sequence", "expert")
STAGES = (0, 3)
SIZE = SplitSize(num_layers=8, width=1024, num_heads=16, sequence_length=1024)
REHEARSED = SplitSize(num_layers=1, width=32, num_heads=8, sequence_length=16)
WORKER = Path(__file__).with_name("_splits_worker.py")
Case = tuple[str, int]  # what is split, ZeRO stage


def size_of(split: str) -> SplitSize:
    """Experts make the model larger."""
    size = REHEARSED if _device.is_rehearsal() else SIZE
    return replace(size, num_experts=NUM_SIMULATED) if split == "expert" else size


def measure(record: Record) -> None:
    stages = (3,) if _device.is_rehearsal() else STAGES
    record.note("the model's experts ask the host for the rows of each: most waits beside experts are its own")
    cases = [(split, stage) for split in SPLITS for stage in stages]
    compare(record, cases)
    for split, stage in cases:
        what = f"simulated, {split}, stage {stage}"
        if record.wants(what):
            with record.measuring(what), fake_group(), nothing_is_compared():
                simulate(record, split, stage)


# -- two ranks on one device ----------------------------------------------------------------------------------------


def compare(record: Record, cases: list[Case]) -> None:
    device = _device.type_of_device()
    own = dist.get_default_backend_for_device(device)
    backends = dict.fromkeys(name for name in ("gloo", own) if device in dist.Backend.backend_capability[name])
    if device == "cuda":  # all ranks see one device alone
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    wanted = {
        backend: [case for case in cases if record.wants(f"{backend}, {case[0]}, stage {case[1]}")]
        for backend in backends
    }
    expected = {
        split: train(size_of(split), ROWS, {}, 0, STEPS)["losses"]
        for split in dict.fromkeys(split for chosen in wanted.values() for split, _ in chosen)
    }
    for backend, chosen in wanted.items():
        # A job of its own for each, as one may hang; in a rehearsal the start of ranks is what takes the time.
        for job in [chosen] if _device.is_rehearsal() else [[case] for case in chosen]:
            if record.left_seconds < LEAST_SECONDS:
                record.note(f"{backend}, {job}: no time was left; `benchmarks/gpu.sh splits --only '{backend}'`")
                continue
            with record.measuring(f"{backend}, {job}"):
                run(record, backend, job, expected)


def run(record: Record, backend: str, cases: list[Case], expected: dict[str, list[float]]) -> None:
    """A row for each. That NCCL does not start is no failure; that losses differ is one."""
    chosen = [(asdict(size_of(split)), {split: NUM_RANKS}, stage) for split, stage in cases]
    job = {"backend": backend, "rows": ROWS, "steps": STEPS, "cases": chosen}
    environment = environment_of(1, None, _device.type_of_device())
    try:
        limit = record.job_seconds(MOST_SECONDS)
        found = run_ranks(WORKER, job, NUM_RANKS, sys.executable, environment, limit)
    except JobError as error:
        for split, stage in cases:
            record.add(
                "two ranks on one device", split=split, backend=backend, stage=stage,
                outcome=f"refused: {one_line(error)}",
            )  # fmt: skip
        if backend != "nccl":
            raise
        return
    for number, (split, stage) in enumerate(cases):
        of_ranks = [one["cases"][number] for one in found]
        difference = loss_difference([one["losses"] for one in of_ranks], expected[split])
        peaks = [one["peak_bytes"] for one in of_ranks if one["peak_bytes"] is not None]
        record.add(
            "two ranks on one device",
            split=split,
            backend=backend,
            stage=stage,
            outcome="trained",
            largest_difference=difference,
            ms_a_step=statistics.median(max(one["seconds"][step] for one in of_ranks) for step in range(STEPS)) * 1e3,
            peak_MiB=max(peaks) / _device.MIB if peaks else None,
        )
        if difference is None or not difference <= TOLERANCE:
            text = f"expected at most {TOLERANCE} (relative) from the losses of one rank, found {difference}"
            record.fail(f"{backend}, {split}, stage {stage}", text)


# -- one of eight ---------------------------------------------------------------------------------------------------


@contextmanager
def nothing_is_compared() -> Iterator[None]:
    """Between ranks: all would differ from what the simulated ones do not send."""

    def nothing(*_: object) -> None: ...

    with (
        mock.patch.object(ModelCall, "try_once", nothing),
        mock.patch.object(ModelCall, "compare_once", nothing),
        mock.patch.object(SameBatch, "check", nothing),
    ):
        yield


def simulate(record: Record, split: str, stage: int) -> None:
    _device.forget_memory()
    engine = lowtide.initialize(build_model(size_of(split)), config_of({split: NUM_SIMULATED}, stage))
    batch = build_batch(size_of(split), ROWS, _device.type_of_device())
    try:
        for _ in range(WARMUP_STEPS):
            engine.train_step(batch)
        seconds = []
        for _ in range(TIMED_STEPS):
            _device.synchronize()
            started = time.perf_counter()
            engine.train_step(batch)
            launched = time.perf_counter()
            _device.synchronize()
            seconds.append((time.perf_counter() - started, launched - started))
        with _device.host_waits() as waits:
            engine.train_step(batch)
        found = _device.Memory.now()
    finally:
        engine.close()
    whole, until_launched = (statistics.median(one) * 1e3 for one in zip(*seconds, strict=True))
    record.add(
        f"one of {NUM_SIMULATED} ranks that share",
        split=split,
        stage=stage,
        ms_a_step=whole,
        ms_until_launched=until_launched,
        waits_a_step=len(waits),
        peak_allocated_MiB=None if found.peak is None else found.peak / _device.MIB,
    )
