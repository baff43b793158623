"""One rank of one try: trains a contender within a budget of memory and writes what it saw as JSON.

Called by `_largest_job.py` as `_largest_worker.py JOB.json`, with torchrun's environment variables. It leaves as
[Note: Leaving] in `_worker.py` says, and with OVER_BUDGET_STATUS as soon as it needs more than the budget: then an
allocation on the GPU fails, or a sample of the host's memory is too high.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import _device
import torch
import torch.distributed as dist
from _longest import LongGPT, build_long_batch
from _memory import OVER_BUDGET_STATUS, PeakSampler, rank_bytes
from _model import GPT, SEED, build_batches, sized
from _trainers import BUILDERS, Setup, import_libraries

_LAST_SECONDS = 30.0  # between the first rank that is done and the last one
_SAMPLING_SECONDS = 0.005  # steps of a small model are short


def train(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Gives losses and seconds of every step (warm-up too) and the highest memory of this rank, above its start.

    All steps train on one batch, so that a loss that never changes means that nothing was trained.
    """
    setup = Setup(job["microbatch"], device=job["device"], dtype=job["dtype"], recompute_blocks=job["recompute_blocks"])
    if job["backend"]:
        dist.init_process_group(job["backend"])
    rows = job["global_rows"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    if job["sequence_length"] is None:
        ((tokens, targets),) = build_batches(job["size"], job["text_file"], 1, rows)
        model: Callable[[], torch.nn.Module] = partial(GPT, sized(job["size"], job["num_layers"]))
    else:
        tokens, targets = build_long_batch(job["sequence_length"], rows)
        model = LongGPT
    batch = (tokens[share].to(setup.device), targets[share].to(setup.device))
    measures_host = job["measures_memory"] and setup.device == "cpu"
    if measures_host:
        import_libraries(job["kind"], setup)
    torch.manual_seed(SEED)
    losses: list[float] = []
    seconds: list[float] = []
    start_bytes = rank_bytes(ranks) if measures_host else None
    sampler = None if start_bytes is None else _sampler(ranks, start_bytes + job["budget_bytes"])
    with sampler or nullcontext():
        trainer = BUILDERS[job["kind"]](model, setup, **job["options"])
        for _ in range(job["warmup"] + job["steps"]):
            started = time.perf_counter()
            loss = trainer.step(*batch)
            if setup.device != "cpu":
                _device.synchronize()
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
    peak_bytes = None if sampler is None or start_bytes is None else sampler.peak_bytes - start_bytes
    if setup.device != "cpu":
        peak_bytes = _device.Memory.now().peak_reserved
    trainer.close()
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak_bytes}


def _sampler(ranks: int, most_bytes: int) -> PeakSampler:
    """Ends this process as soon as it holds more than so much."""

    def check(peak_bytes: int) -> None:
        if peak_bytes > most_bytes:
            _leave(OVER_BUDGET_STATUS)

    return PeakSampler(ranks, _SAMPLING_SECONDS, check)


def limit_device(budget_bytes: int) -> None:
    """Chooses this rank's device, and lets torch take no more than the budget of it."""
    _device.choose(int(os.environ["LOCAL_RANK"]))
    _device.limit_memory(budget_bytes)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Says whether the GPU had no memory left, also where an error of another class was made of that."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _wait_for(files: list[Path]) -> None:
    """Rank 0 has the store, through which the others may still end a collective."""
    deadline = time.monotonic() + _LAST_SECONDS
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.01)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job["threads"])
    _device.prepare()
    if job["device"] != "cpu":
        limit_device(job["budget_bytes"])
    try:
        found = train(job, rank, ranks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        _leave(OVER_BUDGET_STATUS)
    files = [Path(sys.argv[1]).with_name(f"rank{number}.json") for number in range(ranks)]
    files[rank].write_text(json.dumps(found))
    if rank == 0:
        _wait_for(files)
    _leave(0)


if __name__ == "__main__":
    main()
