"""One rank: trains each case of a job for some steps, and writes the seconds of each step as JSON.

Called by `predicted.py` as `_predicted_worker.py JOB.json`, with torchrun's environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _model import GPTSize
from _planned import batch, build

import lowtide


def train(case: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Seconds of each step: as they pass, and of this process on a processor. The first two are left out."""
    size = GPTSize(**case["size"])
    walls, works = [], []
    with lowtide.initialize(build(size), case["config"]) as engine:
        config = engine.config
        rows = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1)
        data = batch(size, rows)
        for _ in range(steps + 2):
            wall, work = time.perf_counter(), time.process_time()
            engine.train_step(data)
            walls.append(time.perf_counter() - wall)
            works.append(time.process_time() - work)
    return {"wall": walls[2:], "work": works[2:]}


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    found = [train(case, job["steps"]) for _ in range(job["rounds"]) for case in job["cases"]]
    path.with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
