"""One rank of a job: `_worker.py JOB.json`, with torchrun's environment variables, as `_harness.py` starts it.

It calls the function that the job names ("compare:train"), with the job, and writes what that gives as JSON. Scripts
that compare with DeepSpeed import torch and these helpers alone outside of functions, so that the interpreter of
another environment can run them.

[Note: Leaving]
A worker leaves with `os._exit` after its file is written. Torch 2.13 can deadlock when a gloo group is destroyed: the
destructor holds the interpreter's lock and joins a thread that waits for that lock to drop a tensor. It met about half
of the jobs with ZeroRedundancyOptimizer. Rank 0 has the store, through which the others may still end a collective: it
leaves last.

[Note: Memory of a rank]
It is what the rank costs the host:

    bytes of a rank = private bytes + shared-memory bytes / processes that map them + library bytes / ranks

- private: `RssAnon` of `/proc/self/status`: heap, stacks, anonymous maps. Nobody else holds them.
- shared memory: `Pss_Shmem` of `/proc/self/smaps_rollup` (files of `/dev/shm`): the kernel counts a page that k
  have touched as 1/k in each of them, so the sum over the ranks is always what the host holds.
- libraries: `RssFile` divided by the ranks of the job. `Pss_File` becomes smaller as soon as somebody else on the
  machine runs torch too.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
KIB = 1024
OVER_BUDGET_STATUS = 75
"""A rank ends with it when the model needs more memory than the rank may take; nothing else ends so."""
_LAST_SECONDS = 30.0  # between the first rank that is done and the last one


def supported() -> bool:
    """Says whether this system tells what is needed (Linux 5.0 or newer)."""
    return STATUS.exists() and ROLLUP.exists() and "Pss_Shmem:" in ROLLUP.read_text()


def kib_of(text: str, key: str) -> int:
    return int(text.split(f"{key}:", 1)[1].split(None, 1)[0])


def rank_bytes(ranks: int, above: int = 0) -> int:
    """Gives the bytes that this process costs the host now, as [Note: Memory of a rank] has it.

    The roll-up walks the page table (about 10 ms a GiB) and blocks page faults meanwhile. It is left out, and 0 given,
    where even shared memory counted whole would not bring the sum over `above`; and where there is no shared memory.
    """
    status = STATUS.read_text()
    shared_kib = kib_of(status, "RssShmem")
    others_kib = kib_of(status, "RssAnon") + kib_of(status, "RssFile") // ranks
    if (others_kib + shared_kib) * KIB <= above:
        return 0
    if shared_kib:
        shared_kib = kib_of(ROLLUP.read_text(), "Pss_Shmem")
    return (others_kib + shared_kib) * KIB


def sent_bytes(device: str) -> int:
    """Gives what the kernel has counted as sent by a device of this process's network, with the headers of packets."""
    import psutil

    return psutil.net_io_counters(pernic=True, nowrap=False)[device].bytes_sent


class PeakSampler:
    """Keeps the highest `rank_bytes` in the `with`, sampled from a thread; does nothing unless `is_on`.

    It uses at most half of the time for itself, and so slows the training: use it in jobs that are not timed.
    budget_bytes: the process ends with OVER_BUDGET_STATUS as soon as it holds so much more than at first.
    """

    def __init__(self, is_on: bool, interval_seconds: float = 0.02, budget_bytes: float = math.inf) -> None:
        self._ranks = int(os.environ["WORLD_SIZE"])
        self._is_on = is_on
        self.start_bytes = rank_bytes(self._ranks) if is_on else 0
        self.peak_bytes = 0
        self._budget_bytes = budget_bytes
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def sample(self) -> None:
        """Take one sample now."""
        self.peak_bytes = max(self.peak_bytes, rank_bytes(self._ranks, above=self.peak_bytes))
        if self.peak_bytes - self.start_bytes > self._budget_bytes:
            leave(OVER_BUDGET_STATUS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = time.perf_counter()
            self.sample()
            cost_seconds = time.perf_counter() - started
            self._stopped.wait(max(self._interval_seconds - cost_seconds, cost_seconds))

    def __enter__(self) -> PeakSampler:
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            self._stopped.set()
            self._thread.join()
            self.sample()


def timed_steps(
    step: Callable[..., Any],
    batches: Iterable[Sequence[Any]],
    warmup: int,
    memory: PeakSampler,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return losses of every step, None where this rank does not know them, and bytes in a memory job.

    And seconds of those after the warm-up. before, after: called around each step, out of its time.
    """
    losses, seconds = [], []
    with memory:
        for batch in batches:
            before()
            started = time.perf_counter()
            loss = step(*batch)
            seconds.append(time.perf_counter() - started)
            losses.append(None if loss is None else float(loss))
            after()
    bytes_found = {"baseline_bytes": memory.start_bytes or None, "peak_bytes": memory.peak_bytes or None}
    return {"losses": losses, "seconds": seconds[warmup:], **bytes_found}


def leave(status: int) -> NoReturn:
    """Ends this process at once. [Note: Leaving]"""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_fork(path: str, environment: dict[str, str], log: str) -> None:
    """Be a rank in a process that was forked, as one that is started is: with its group, environment and log."""
    os.setsid()
    with open(log, "wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)  # a test may have put others there
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    try:
        run(Path(path))
    except BaseException:
        traceback.print_exc()
        leave(1)


def run(path: Path) -> None:
    job: dict[str, Any] = json.loads(path.read_text())
    if "cgroup" in job:  # joined before anything has taken memory
        Path(job["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    import torch

    torch.set_num_threads(job["threads"])
    module, function = job["worker"].split(":")
    found = getattr(importlib.import_module(module), function)(job)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    files = [path.with_name(f"rank{number}.json") for number in range(ranks)]
    unfinished = files[rank].with_suffix(".part")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(files[rank])
    deadline = time.monotonic() + _LAST_SECONDS
    while rank == 0 and not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.01)
    leave(0)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
