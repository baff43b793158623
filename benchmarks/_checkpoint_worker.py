"""One rank of one job: trains a step, then saves, loads and exports, and writes what it saw as JSON.

Called by `_checkpoint_job.py` as `_checkpoint_worker.py JOB.json`, with torchrun's environment variables. It needs
torch alone (and safetensors for FSDP2's export), so that the interpreter of another environment can run it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _checkpoint_contenders import BUILDERS, Saver, all_equal, barrier
from _checkpoint_disk import bring_to_cache, bytes_below, drop_from_cache, files_below, sync_files
from _memory import PeakSampler, rank_bytes
from _model import build_batches, build_model

_NUM_REPLAYED = 2  # steps whose losses must be the same after a load: the second one also depends on the moments
_SAMPLE_SECONDS = 0.004


class Stopwatch:
    """Times what all ranks do together, and in a memory job counts the bytes that it takes above what was there.

    cpu_seconds: of all threads of this rank, the wait for the others included, which polls little.
    """

    def __init__(self, ranks: int, counts_memory: bool) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        self.extra_bytes: dict[str, int] = {}
        self._ranks = ranks
        self._counts_memory = counts_memory

    def run(self, name: str, work: Callable[[], Any], then: Callable[[], Any] | None = None) -> None:
        """Times `work` as `name`, and both together as `name.done`; each ends when all ranks are through."""
        before = rank_bytes(self._ranks) if self._counts_memory else 0
        sampler = PeakSampler(self._ranks, _SAMPLE_SECONDS) if self._counts_memory else None
        barrier()
        with sampler or nullcontext():
            started, cpu_started = time.perf_counter(), time.process_time()
            work()
            barrier()
            returned = time.perf_counter()
        if then is not None:
            then()
            barrier()
            self.seconds.setdefault(f"{name}.done", []).append(time.perf_counter() - started)
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu_started)
        self.seconds.setdefault(name, []).append(returned - started)
        if sampler:
            extra = max(sampler.peak_bytes - before, 0)
            self.extra_bytes[name] = max(self.extra_bytes.get(name, 0), extra)


def run(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Gives the seconds and extra bytes of every operation, and whether training goes on the same after a load."""
    batches = [
        (tokens[rank::ranks], targets[rank::ranks])
        for tokens, targets in build_batches(job["size"], job["text_file"], 1 + _NUM_REPLAYED, ranks)
    ]
    saver = BUILDERS[job["kind"]](build_model(job["size"], tied=False), **job["options"])
    saver.step(*batches[0])
    watch = Stopwatch(ranks, job["allocator"] is not None)
    folder = _save(saver, watch, Path(job["folder"]), job["repeats"], rank)
    expected = [float(saver.step(*batch)) for batch in batches[1:]]
    for _ in range(job["repeats"]):
        if rank == 0:
            drop_from_cache(files_below(folder))
        watch.run("load cold", lambda: saver.load(folder))
        if rank == 0:
            bring_to_cache(files_below(folder))  # a cold load may have read past it
        watch.run("load warm", lambda: saver.load(folder))
    found = [float(saver.step(*batch)) for batch in batches[1:]]
    exported = _export(saver, watch, Path(job["folder"]), job["repeats"], rank)
    return {
        "seconds": watch.seconds,
        "cpu_seconds": watch.cpu_seconds,
        "extra_bytes": watch.extra_bytes,
        "losses_are_equal": all_equal(expected, found),
        "saved_bytes": bytes_below(folder),
        "exported_bytes": bytes_below(exported),
    }


def _save(saver: Saver, watch: Stopwatch, base: Path, repeats: int, rank: int) -> Path:
    """Saves into one new folder after the other, and gives the last one, which stays."""
    folder = base
    for number in range(repeats):
        if rank == 0 and number:
            shutil.rmtree(folder)
        folder = base / f"save{number}"

        def finish(folder: Path = folder) -> None:
            if rank == 0:
                saver.finish(folder)
                sync_files(folder)

        watch.run("save", partial(saver.save, folder), finish)
    return folder


def _export(saver: Saver, watch: Stopwatch, base: Path, repeats: int, rank: int) -> Path:
    folder = base
    for number in range(repeats):
        if rank == 0 and number:
            shutil.rmtree(folder)
        folder = base / f"export{number}"

        def finish(folder: Path = folder) -> None:
            if rank == 0:
                sync_files(folder)

        watch.run("export", partial(saver.export, folder), finish)
    return folder


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job["threads"])
    found = run(job, rank, ranks)
    Path(sys.argv[1]).with_name(f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see [Note: Leaving] in _worker.py


if __name__ == "__main__":
    main()
