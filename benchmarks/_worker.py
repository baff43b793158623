"""One rank of one job: trains a contender for some steps and writes what it saw as JSON.

Called by `_job.py` as `_worker.py JOB.json`, with torchrun's environment variables. It needs torch alone, so that the
interpreter of another environment can run it.

[Note: Leaving]
A worker leaves with `os._exit` after its file is written. Torch 2.13 can deadlock when a gloo group is destroyed: the
destructor holds the interpreter's lock and joins a thread that waits for that lock to drop a tensor. It met about half
of the jobs with ZeroRedundancyOptimizer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _memory import PeakSampler, rank_bytes
from _model import build_batches, build_model
from _trainers import BUILDERS, Setup


def train(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Gives losses and seconds of every step (warm-up too) and, in a memory run, the bytes of this rank."""
    measure_memory = job["allocator"] is not None
    baseline_bytes = rank_bytes(ranks) if measure_memory else None
    num_steps = job["warmup"] + job["steps"]
    rows = job["global_rows"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    batches = [
        (tokens[share], targets[share])
        for tokens, targets in build_batches(job["size"], job["text_file"], num_steps, rows)
    ]
    model = build_model(job["size"], tied=job["tied"])
    setup = Setup(job["microbatch"], job["accumulation"], job["clip"])
    trainer = BUILDERS[job["kind"]](model, setup, **job["options"])
    del model
    losses: list[float] = []
    seconds: list[float] = []
    sampler = PeakSampler(ranks) if measure_memory else None
    with sampler or nullcontext():
        for tokens, targets in batches:
            started = time.perf_counter()
            loss = trainer.step(tokens, targets)
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
    rest_bytes = rank_bytes(ranks) if measure_memory else None
    trainer.close()
    return {
        "losses": losses,
        "seconds": seconds,
        "baseline_bytes": baseline_bytes,
        "peak_bytes": sampler.peak_bytes if sampler else None,
        "rest_bytes": rest_bytes,
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job["threads"])
    found = train(job, rank, ranks)
    Path(sys.argv[1]).with_name(f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # [Note: Leaving]


if __name__ == "__main__":
    main()
