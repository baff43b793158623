"""One rank of a job of part `splits`: trains the model with each of its splits, and writes what it saw as JSON.

Called by `_gpu_splits.py` as `_splits_worker.py JOB.json`, with torchrun's environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import _device
import torch
import torch.distributed as dist
from _splits_model import SplitSize, build_batch, build_model

import lowtide


def config_of(parallel: dict[str, int], stage: int) -> dict[str, Any]:
    whole = {"embed_tokens": "whole", "lm_head": "whole"}
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


def train(size: SplitSize, rows: int, parallel: dict[str, int], stage: int, steps: int) -> dict[str, Any]:
    """Losses and seconds of every step, and the most memory of this rank. rows: of the global batch."""
    _device.forget_memory()
    engine = lowtide.initialize(build_model(size), config_of(parallel, stage))
    of_rank = rows // engine.data_size
    share = slice(engine.data_rank * of_rank, (engine.data_rank + 1) * of_rank)
    batch = {name: values[share] for name, values in build_batch(size, rows, _device.type_of_device()).items()}
    losses, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(engine.train_step(batch).loss.item())
        _device.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = _device.Memory.now().peak
    engine.close()
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak}


def main() -> None:
    """job: "backend", "rows", "steps", and "cases": [size, parallel, stage] of each."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    _device.prepare()
    _device.choose(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(job["backend"])
    found = [
        train(SplitSize(**size), job["rows"], parallel, stage, job["steps"]) for size, parallel, stage in job["cases"]
    ]
    dist.barrier()
    Path(sys.argv[1]).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps({"cases": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
