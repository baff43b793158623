"""One rank of the comparison on the wire: all contenders of a job in one process, a few steps of each in turn.

Called by `wire.py` as `_wire_worker.py JOB.json` on its host, with torchrun's environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _model import build_batches, build_model
from _namespaces import sent_bytes, set_speed
from _wire_contenders import CONTENDERS, LEARNING_RATE
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]


def build_lowtide(model: nn.Module, rows: int, options: dict[str, Any]) -> Step:
    """bf16 in every message that is not of fewer bits."""
    import lowtide

    config = {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "optimizer": {"type": "adamw", "params": {"lr": LEARNING_RATE}},
        "seed": 1,
        "steps_per_print": 0,
        **options,
    }
    engine = lowtide.initialize(model, config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_step((tokens, targets)).loss
        return loss

    return step


def _plain(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_ddp(model: nn.Module, rows: int, options: dict[str, Any]) -> Step:
    """torch's DDP with one of its own hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # One bucket: the hook starts sums of several in the order in which earlier ones end, which differs between ranks.
    cap = 1000 if options["hook"] == "powersgd" else 25
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if options["hook"] == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _plain(wrapped)


def build_fsdp2(model: nn.Module, rows: int, options: dict[str, Any]) -> Step:
    """`fully_shard` on every block, then on the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return _plain(model)


BUILDERS = {"lowtide": build_lowtide, "ddp": build_ddp, "fsdp2": build_fsdp2}


def measured(job: dict[str, Any], rank: int, ranks: int) -> list[dict[str, Any]]:
    """A record of each contender in each round at each speed: seconds and bytes of a step."""
    is_first_of_host = int(os.environ["LOCAL_RANK"]) == 0
    rows = job["rows"]
    share = slice(rank * rows, (rank + 1) * rows)
    text = __file__
    batches = [(a[share], b[share]) for a, b in build_batches(job["size"], text, 8, rows * ranks)]
    steps: dict[str, Step] = {}
    for name in job["contenders"]:
        contender = CONTENDERS[name]
        model = build_model(job["size"], tied=False)
        steps[name] = BUILDERS[contender.kind](model, rows, contender.options)
        for number in range(job["warmup"]):
            steps[name](*batches[number % len(batches)])
    found = []
    for speed in job["speeds"]:
        if is_first_of_host:
            set_speed(speed)
        for number in range(job["rounds"]):
            for name, step in steps.items():
                dist.barrier()
                before, worked, started = sent_bytes(), time.process_time(), time.perf_counter()
                for count in range(job["steps"]):
                    loss = step(*batches[count % len(batches)])
                dist.barrier()  # a packet that waits still counts as the step's
                seconds, sent = time.perf_counter() - started, sent_bytes() - before
                each = {"seconds": seconds / job["steps"], "bytes": sent / job["steps"], "loss": float(loss)}
                each["processor_seconds"] = (time.process_time() - worked) / job["steps"]
                found.append({"contender": name, "speed": speed, "round": number, "steps": job["steps"], **each})
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measured(job, rank, ranks)
    Path(sys.argv[1]).with_name(f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as `_worker.py` does: see its [Note: Leaving]


if __name__ == "__main__":
    main()
