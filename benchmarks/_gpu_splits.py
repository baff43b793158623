"""Parts `ranks` and `splits` of benchmarks/gpu.sh: states, layers, sequences and experts that ranks share.

Two ranks on one device, by gloo, and by NCCL where it lets them: their losses are compared with those of one rank that
has it all. NCCL refuses two ranks on one GPU in most versions: then a row says so in its words. And one of eight
simulated ranks, as in part `trace`: what a rank's share costs the host and the device, with collectives that take no
time. What ranks compare is left out there, since the simulated ones send nothing: whether all have the same batch, and,
tried once, whether a split model computes what the whole one does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import _device
import torch
import torch.distributed as dist
from _gpu_part import Record, one_line
from _gpu_trace import NUM_RANKS as NUM_SIMULATED
from _gpu_trace import fake_group, timed_steps
from _harness import JobError, environment_of, loss_difference, run_ranks
from torch import Tensor, nn

import lowtide
from lowtide.engine.plan.llama import Gated, Llama, Shape
from lowtide.engine.step.batch_consistency import BatchConsistencyCheck
from lowtide.engine.step.self_checks import SequenceCheck, SplitCheck

NUM_RANKS, ROWS, STEPS = 2, 2, 3
DATA, SPLITS = "data", ("tensor", "sequence", "expert")
STAGES = (0, 3)
LEAST_SECONDS = 30.0
MOST_SECONDS = 60.0  # of a job: a hang is told, and does not take the part's time
TOLERANCE = 1e-4
Case = tuple[str, int]  # what is split, ZeRO stage


def measure(record: Record) -> None:
    record.note("the model's experts ask the host for the rows of each: most waits beside experts are its own")
    cases = [(split, stage) for split in SPLITS for stage in ((3,) if _device.is_rehearsal() else STAGES)]
    compare(record, cases)
    for split, stage in cases:
        what = f"simulated, {split}, stage {stage}"
        if record.wants(what):
            with record.measuring(what), fake_group(), nothing_is_compared():
                simulate(record, split, stage)


def measure_ranks(record: Record) -> None:
    """Part `ranks`: the ranks share ZeRO's states alone."""
    compare(record, [(DATA, stage) for stage in ((3,) if _device.is_rehearsal() else (0, 1, 2, 3))])


def parallel_of(split: str, ranks: int) -> dict[str, int]:
    return {} if split == DATA else {split: ranks}


# -- the model: the planner's Llama, with experts or without -----------------------------------------------------------


SEED = 1234
SIZE = Shape(layers=8, hidden=1024, heads=16, vocabulary=256, sequence=1024, mlp=4096)
REHEARSED = Shape(layers=1, hidden=32, heads=8, vocabulary=256, sequence=16, mlp=128)


class Experts(nn.Module):
    """Two experts for each token, of a list."""

    def __init__(self, shape: Shape, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(Gated(shape) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, choices = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, place = torch.where(choices == number)
            out = out.index_add(0, at, expert(rows[at]) * weights[at, place, None])
        return out.view_as(x)


def shape_of_split() -> Shape:
    return REHEARSED if _device.is_rehearsal() else SIZE


def build_model(split: str) -> Llama:
    """The same weights in every process; with experts where these are split."""
    shape = shape_of_split()
    torch.manual_seed(SEED)
    model = Llama(shape)
    if split == "expert":
        for layer in model.layers:
            layer.mlp = Experts(shape, NUM_SIMULATED)
    return model


def build_batch(rows: int, device: str) -> dict[str, Tensor]:
    """The same rows in every process."""
    shape, numbers = shape_of_split(), torch.Generator().manual_seed(SEED)
    tokens = torch.randint(shape.vocabulary, (rows, shape.sequence + 1), generator=numbers).to(device)
    positions = torch.arange(shape.sequence, device=device).expand(rows, -1)
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": tokens[:, 1:].contiguous()}


# -- a rank ----------------------------------------------------------------------------------------------------------


def config_of(parallel: dict[str, int], stage: int) -> dict[str, Any]:
    whole = {"embedding": "whole", "head": "whole"}
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "adamw"},
        "gradient_clipping": 1.0,
        "parallel": parallel,
        **({"tensor_parallel": {"plan": whole}} if "tensor" in parallel else {}),
        "kernels": {"fuse_modules": False},
        "device": _device.config_name(),
        "steps_per_print": 0,
    }


def train(split: str, rows: int, parallel: dict[str, int], stage: int, steps: int) -> dict[str, Any]:
    """Losses and seconds of every step, and the most memory of this rank. rows: of the global batch."""
    _device.forget_memory()
    engine = lowtide.initialize(build_model(split), config_of(parallel, stage))
    of_rank = rows // engine.data_size
    share = slice(engine.data_rank * of_rank, (engine.data_rank + 1) * of_rank)
    batch = {name: values[share] for name, values in build_batch(rows, _device.type_of_device()).items()}
    losses, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(engine.train_step(batch).loss.item())
        _device.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = _device.Memory.now().peak
    engine.close()
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak}


def train_cases(job: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank. job: "backend", "rows", "steps", and "cases": [split, parallel, stage] of each."""
    _device.prepare()
    _device.choose(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(job["backend"])
    found = [train(split, job["rows"], parallel, stage, job["steps"]) for split, parallel, stage in job["cases"]]
    dist.barrier()
    return found


# -- two ranks on one device -----------------------------------------------------------------------------------------


def compare(record: Record, cases: list[Case]) -> None:
    device = _device.type_of_device()
    own = dist.get_default_backend_for_device(device)
    backends = dict.fromkeys(name for name in ("gloo", own) if device in dist.Backend.backend_capability[name])
    record.note(f"of gloo and NCCL, this torch has for {device}: {', '.join(backends)}")
    if device == "cuda":  # all ranks see one device alone
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    wanted = {
        backend: [case for case in cases if record.wants(f"{backend}, {case[0]}, stage {case[1]}")]
        for backend in backends
    }
    expected = {
        split: train(split, ROWS, {}, 0, STEPS)["losses"]
        for split in dict.fromkeys(split for chosen in wanted.values() for split, _ in chosen)
    }
    for backend, chosen in wanted.items():
        # A job of its own for each, as one may hang; in a rehearsal the start of ranks is what takes the time.
        for job in [chosen] if _device.is_rehearsal() else [[case] for case in chosen]:
            if not job or record.left_seconds < LEAST_SECONDS:
                record.note(f"{backend}: no time was left for {len(job)} of its trainings")
                continue
            with record.measuring(f"{backend}, {job}"):
                run(record, backend, job, expected)


def run(record: Record, backend: str, cases: list[Case], expected: dict[str, list[float]]) -> None:
    """A row for each. That NCCL does not start is no failure; that losses differ is one."""
    chosen = [(split, parallel_of(split, NUM_RANKS), stage) for split, stage in cases]
    job = {
        "worker": "_gpu_splits:train_cases",
        "threads": 1,
        "backend": backend,
        "rows": ROWS,
        "steps": STEPS,
        "cases": chosen,
    }
    environment = environment_of(1, None, _device.type_of_device())
    try:
        limit = record.job_seconds(MOST_SECONDS)
        found = run_ranks(job, NUM_RANKS, sys.executable, environment, limit)
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
        of_ranks = [one[number] for one in found]
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


# -- one of eight ----------------------------------------------------------------------------------------------------


@contextmanager
def nothing_is_compared() -> Iterator[None]:
    """Between ranks: all would differ from what the simulated ones do not send."""

    with (
        mock.patch.object(SplitCheck, "of", lambda parts: None),
        mock.patch.object(SequenceCheck, "of", lambda parts: None),
        mock.patch.object(BatchConsistencyCheck, "of", lambda parts: None),
    ):
        yield


def simulate(record: Record, split: str, stage: int) -> None:
    _device.forget_memory()
    engine = lowtide.initialize(build_model(split), config_of(parallel_of(split, NUM_SIMULATED), stage))
    batch = build_batch(ROWS, _device.type_of_device())
    try:
        whole, until_launched = timed_steps(engine, batch)
        with _device.host_waits() as waits:
            engine.train_step(batch)
        found = _device.Memory.now()
    finally:
        engine.close()
    record.add(
        f"one of {NUM_SIMULATED} ranks that share",
        split=split,
        stage=stage,
        ms_a_step=whole,
        ms_until_launched=until_launched,
        waits_a_step=len(waits),
        peak_allocated_MiB=None if found.peak is None else found.peak / _device.MIB,
    )
