"""One rank of one job over a pipeline: trains some steps and writes what it saw as JSON.

Called as `_pipeline_worker.py JOB.json` by `_pipeline_job.py`, with torchrun's environment variables. It leaves as
[Note: Leaving] in `_worker.py` says.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _memory import PeakSampler, rank_bytes
from _pipeline_contenders import CONTENDERS
from _pipeline_models import (
    SLEEPING_ROWS,
    SleepingProducts,
    build_batches,
    build_model,
    build_sleeping_batches,
    build_sleeping_model,
)
from _pipeline_trainers import BUILDERS, Timeline


def train(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Gives the losses, the seconds and the timeline of every step (warm-up too), and in memory jobs the peak.

    A step's seconds are from a barrier to this rank's end of it.
    """
    contender, microbatches = CONTENDERS[job["contender"]], job["microbatches"]
    num_steps = job["warmup"] + job["steps"]
    sleeps = job["sleeps"]  # seconds of a rank's share: forward, input half, weight half
    if sleeps is None:
        rows, model = job["rows"], build_model(job["size"])
        batches = build_batches(job["size"], num_steps, rows * microbatches)
    else:
        rows, model = SLEEPING_ROWS, build_sleeping_model(2 * ranks)
        batches = build_sleeping_batches(num_steps, microbatches)
    work = SleepingProducts(*(seconds / 2 for seconds in sleeps)) if sleeps else nullcontext()  # 2 blocks a rank
    dist.init_process_group("gloo")
    message_seconds = time_of_a_message() if sleeps else 0.0
    trainer = BUILDERS[contender.kind](model, contender, ranks, microbatches, rows)
    del model
    found: dict[str, Any] = {"losses": [], "seconds": [], "timelines": [], "started": []}
    sampler = PeakSampler(ranks) if job["allocator"] else None
    baseline_bytes = rank_bytes(ranks) if sampler else 0
    with sampler or nullcontext():
        for tokens, targets in batches:
            dist.barrier()
            started = time.perf_counter()
            with work:
                loss = trainer.step(tokens, targets)
            found["seconds"].append(time.perf_counter() - started)
            found["started"].append(started)
            found["losses"].append(loss)
            if trainer.timeline:
                found["timelines"].append(trainer.timeline())
    dist.barrier()
    if sleeps and trainer.predicted:
        told = {op: seconds / contender.chunks for op, seconds in zip("FIW", sleeps, strict=True)}
        told["B"] = told["I"] + told["W"]
        timed = told | medians_by_op([action for step in found["timelines"][job["warmup"] :] for action in step])
        found["predicted"] = trainer.predicted(told, 0.0)
        found["predicted_as_timed"] = trainer.predicted(timed, message_seconds)
    found["baseline_bytes"] = baseline_bytes
    return found | {"peak_bytes": sampler.peak_bytes if sampler else 0}


def time_of_a_message(count: int = 20) -> float:
    """Seconds from the send of a small tensor to its arrival at a rank that waits for it; the median, on every rank."""
    rank, took = dist.get_rank(), torch.zeros(count, dtype=torch.float64)
    for index in range(count):
        sent = torch.zeros(1, dtype=torch.float64)
        if rank == 0:
            time.sleep(0.02)
            dist.send(sent.fill_(time.perf_counter()), 1)
        elif rank == 1:
            dist.recv(sent, 0)
            took[index] = time.perf_counter() - sent  # one clock for all processes of a host
    dist.broadcast(took, 1)
    return float(took.median())


def medians_by_op(actions: Timeline) -> dict[str, float]:
    """Seconds of the actions of each kind that there are."""
    seconds: dict[str, list[float]] = {}
    for op, _, _, start, end in actions:
        seconds.setdefault(op, []).append(end - start)
    return {op: statistics.median(values) for op, values in seconds.items()}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    found = train(job, int(os.environ["WORLD_SIZE"]))
    Path(sys.argv[1]).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
