"""What a rank takes beside its tensors: interpreter, what torch and its libraries keep, threads, an engine's objects.

    python -m lowtide.engine.measuring.process EVERY     trains a model of a few bytes, prints what the process takes

It depends on what is imported: torch brings in its compiler, 75 MB, with the first block that is computed again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

EXACT = {  # freed memory goes back at once, so that a process takes what it holds
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_ARENA_MAX": "1",
}
_STATUS = Path("/proc/self/status")
_KIB = 1024
_STEPS = 3
_TIMEOUT_SECONDS = 120.0


def name_of(num_ranks: int, recomputes: bool) -> str:
    """Among the names of `Measured.process_bytes`."""
    return ("several" if num_ranks > 1 else "alone") + (", recomputing" if recomputes else "")


def process_bytes(
    environment_of: Callable[[int, int], Mapping[str, str]],
    cases: Sequence[tuple[int, bool]] = ((1, False), (1, True), (2, False), (2, True)),
) -> dict[str, int]:
    """Private bytes of a rank, by whether it is alone and whether it computes blocks again; {} where nobody says.

    environment_of: of how many ranks, and of which, to its environment. cases: (ranks, whether blocks are recomputed).
    """
    if not _STATUS.exists():
        return {}
    found = {name_of(count, again): _most_of(count, int(again), environment_of) for count, again in cases}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _most_of(count: int, every: int, environment_of: Callable[[int, int], Mapping[str, str]]) -> int:
    """0 where a rank has failed."""
    command = [sys.executable, "-m", "lowtide.engine.measuring.process", str(every)]
    processes = [
        subprocess.Popen(
            command, env={**environment_of(count, rank), **EXACT}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=_TIMEOUT_SECONDS)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(int(words[-1]) if words else 0 for words in said)


def private_bytes() -> int:
    """Of this process now: heap, stacks and maps of no file."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * _KIB
    return 0


def main() -> None:
    """Prints the bytes after a few steps."""
    from ..build import initialize
    from .engines import Small

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "device": "cpu",
        "optimizer": {"type": "adamw", "params": {}},
        "activation_checkpointing": {"every": int(sys.argv[1])},
    }
    with initialize(Small(2), config) as engine:
        for _ in range(_STEPS):
            engine.train_step((torch.ones(1, 16),))
        print(private_bytes(), flush=True)


if __name__ == "__main__":
    main()
