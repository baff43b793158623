"""One rank in a memory cgroup, of `cgroup_law.py`: `_cgroup_worker.py JOB.json` trains a case for some steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from _cgroup import join


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    join(job["cgroup"])

    from _model import GPTSize
    from _planned import batch, build

    import lowtide

    size = GPTSize(**job["case"]["size"])
    with lowtide.initialize(lambda: build(size), job["case"]["config"]) as engine:
        config = engine.config
        rows = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1)
        data = batch(size, rows)
        for _ in range(job["steps"]):
            engine.train_step(data)
    path.with_name(f"rank{os.environ['RANK']}.json").write_text("{}")
    os._exit(0)


if __name__ == "__main__":
    main()
