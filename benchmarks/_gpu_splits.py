"""Part `splits` of benchmarks/gpu.sh: states, layers, sequences and experts that ranks share.

Two ranks on one device, by gloo and by NCCL: their losses are compared with those of one rank that has it all. Most
versions of NCCL refuse two ranks on one GPU: then a row says so, and its other cases are not tried. And one of eight
simulated ranks, as in part `trace`: what a rank's share costs host and device. Self-checks are off there, since
simulated ranks send nothing.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from typing import Any
from unittest import mock

import _device
import torch
import torch.distributed as dist
from _gpu_part import Cell, Record
from _gpu_parts import IS_REHEARSAL, NUM_RANKS, fake_group, timed_steps
from _harness import JobError, Start, environment_of, loss_difference, mib, run_ranks, warm_start
from torch import Tensor, nn

import lowtide
from lowtide.engine.plan.llama import Gated, Llama, Shape
from lowtide.engine.step.batch_consistency import BatchConsistencyCheck
from lowtide.engine.step.self_checks import SequenceCheck, SplitCheck

DATA, SPLITS = "data", ("tensor", "sequence", "expert")
STAGES = (3,) if IS_REHEARSAL else (0, 3)
ROWS, STEPS, SEED = 2, 3, 1234
MOST_SECONDS = 300.0 if IS_REHEARSAL else 40.0  # of a job: one that hangs leaves time for others
TOLERANCE = 1e-4  # relative, of a loss to that of one rank
SHAPE = (
    Shape(layers=1, hidden=32, heads=8, vocabulary=256, sequence=16, mlp=128)
    if IS_REHEARSAL
    else Shape(layers=8, hidden=1024, heads=16, vocabulary=256, sequence=1024, mlp=4096)
)


class Experts(nn.Module):
    """Two experts for each token, of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SHAPE.hidden, NUM_RANKS, bias=False)
        self.experts = nn.ModuleList(Gated(SHAPE) for _ in range(NUM_RANKS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, choices = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, place = torch.where(choices == number)
            out = out.index_add(0, at, expert(rows[at]) * weights[at, place, None])
        return out.view_as(x)


def build(split: str, num_ranks: int, stage: int) -> lowtide.Engine:
    """Return an engine of the planner's Llama, with the same weights in every process."""
    torch.manual_seed(SEED)
    model = Llama(SHAPE)
    if split == "expert":
        for layer in model.layers:
            layer.mlp = Experts()
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "adamw"},
        "gradient_clipping": 1.0,
        "parallel": {} if split == DATA else {split: num_ranks},
        "tensor_parallel": {"plan": {"embedding": "whole", "head": "whole"} if split == "tensor" else None},
        "kernels": {"fuse_modules": False},
        "device": _device.config_name(),
        "steps_per_print": 0,
    }
    return lowtide.initialize(model, config)


def batch_of(engine: lowtide.Engine, rows: int) -> dict[str, Tensor]:
    """Return this rank's rows of the same batch in every process."""
    numbers = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(SHAPE.vocabulary, (rows, SHAPE.sequence + 1), generator=numbers)
    positions = torch.arange(SHAPE.sequence).expand(rows, -1)
    whole = {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": tokens[:, 1:].contiguous()}
    device = _device.type_of_device()
    return {name: value.chunk(engine.data_size)[engine.data_rank].to(device) for name, value in whole.items()}


def train(split: str, num_ranks: int, stage: int) -> dict[str, Any]:
    """Return losses and seconds of every step, and the most memory of this rank."""
    _device.forget_memory()
    losses, seconds = [], []
    with build(split, num_ranks, stage) as engine:
        batch = batch_of(engine, ROWS)
        for _ in range(STEPS):
            took, _, result = _device.timed(lambda: engine.train_step(batch))
            losses.append(float(result.loss))
            seconds.append(took)
        return {"losses": losses, "seconds": seconds, "peak_bytes": _device.peaks().allocated}


def train_rank(job: dict[str, Any]) -> dict[str, Any]:
    """Train on a rank. job: "backend", "split", "stage"."""
    _device.prepare()
    if _device.count():
        torch.accelerator.set_device_index(0)
    dist.init_process_group(job["backend"])
    found = train(job["split"], 2, job["stage"])
    dist.barrier()
    return found


def compare_splits(record: Record) -> None:
    device = _device.type_of_device()
    cases = [(DATA, stage) for stage in STAGES] + [(split, stage) for split in SPLITS for stage in STAGES]
    start = warm_start("torch", "lowtide.engine.build")
    for backend in dict.fromkeys(("gloo", dist.get_default_backend_for_device(device))):
        is_refused = device not in dist.Backend.backend_capability[backend]
        for split, stage in cases:
            what = f"{backend}, {split}, stage {stage}"
            if not is_refused and record.wants(what):
                with record.measuring(what):
                    is_refused = not compare_with_one_rank(record, backend, split, stage, start)
    for split, stage in cases[len(STAGES) :]:
        what = f"simulated, {split}, stage {stage}"
        if record.wants(what):
            with record.measuring(what), fake_group():
                simulate(record, split, stage)


def compare_with_one_rank(record: Record, backend: str, split: str, stage: int, start: Start) -> bool:
    """Add a row; return False where NCCL does not start, which is no failure. That losses differ is one."""
    job = {"worker": "_gpu_splits:train_rank", "threads": 1, "backend": backend, "split": split, "stage": stage}
    environment = environment_of(1, None, _device.type_of_device())
    if _device.type_of_device() == "cuda":  # all ranks see one device alone
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    row: dict[str, Cell] = {"split": split, "backend": backend, "stage": stage}
    try:
        found = run_ranks(job, 2, sys.executable, environment, MOST_SECONDS, start=start)
    except JobError as error:
        record.add("two ranks on one device", **row, outcome=f"refused: {error}")
        if backend == "nccl":
            return False
        raise
    difference = loss_difference([one["losses"] for one in found], train(split, 1, 0)["losses"])
    record.add(
        "two ranks on one device",
        **row,
        outcome="trained",
        largest_difference=difference,
        ms_a_step=statistics.median(max(one["seconds"][step] for one in found) for step in range(STEPS)) * 1e3,
        peak_MiB=mib(max((one["peak_bytes"] for one in found if one["peak_bytes"]), default=None)),
    )
    if difference is None or not difference <= TOLERANCE:
        text = f"expected at most {TOLERANCE} (relative) from the losses of one rank, found {difference}"
        record.fail(f"{backend}, {split}, stage {stage}", text)
    return True


def simulate(record: Record, split: str, stage: int) -> None:
    _device.forget_memory()
    with contextlib.ExitStack() as stack:
        for check in (SplitCheck, SequenceCheck, BatchConsistencyCheck):
            stack.enter_context(mock.patch.object(check, "of", lambda parts: None))
        engine = stack.enter_context(build(split, NUM_RANKS, stage))
        whole, until_launched = timed_steps(engine, batch_of(engine, ROWS))
        record.add(
            f"one of {NUM_RANKS} ranks that share",
            split=split,
            stage=stage,
            ms_a_step=whole,
            ms_until_launched=until_launched,
            peak_MiB=mib(_device.peaks().allocated),
        )
