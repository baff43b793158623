"""Measure the memory of a rank besides its tensors: interpreter, torch and its libraries, threads, engine.

    python -m lowtide.engine.plan.measuring.process EVERY BF16     trains a tiny model and prints the bytes

It depends on the imports: with the first recomputed block torch imports its compiler, 75 MB. In bf16, oneDNN computes
products, and keeps about 0.7 MB of generated code for each of the fifteen kinds and shapes of a transformer.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

EXACT = {  # glibc returns freed memory at once
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_ARENA_MAX": "1",
}
_STATUS = Path("/proc/self/status")
_KIB = 1024
_STEPS = 3
_TIMEOUT_SECONDS = 120.0


def name_of(num_ranks: int, recomputes: bool, is_bf16: bool = False) -> str:
    """Return the name in `Measured.process_bytes`."""
    name = "several" if num_ranks > 1 else "alone"
    return name + (", recomputing" if recomputes else "") + (", bf16" if is_bf16 else "")


def process_bytes(
    environment_of: Callable[[int, int], Mapping[str, str]],
    cases: Sequence[tuple[int, bool, bool]] = tuple(itertools.product((1, 2), (False, True), (False, True))),
) -> dict[str, int]:
    """Return private bytes of a rank by name, or {} on systems without /proc.

    environment_of: (number of ranks, rank) -> its environment. cases: (ranks, recomputation, bf16).
    """
    if not _STATUS.exists():
        return {}
    found = {name_of(*case): _most_of(case[0], [str(int(flag)) for flag in case[1:]], environment_of) for case in cases}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _most_of(count: int, flags: Sequence[str], environment_of: Callable[[int, int], Mapping[str, str]]) -> int:
    """Return the bytes of the largest of `count` ranks, 0 if a rank failed."""
    command = [sys.executable, "-m", "lowtide.engine.plan.measuring.process", *flags]
    processes = [
        subprocess.Popen(
            command, env={**environment_of(count, rank), **EXACT}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_SECONDS)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(int(words[-1]) if words else 0 for words in outputs)


def private_bytes() -> int:
    """Return bytes of this process in heap, stacks and anonymous maps."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * _KIB
    return 0


def main() -> None:
    """Print the private bytes after a few steps."""
    from ...build import initialize
    from .operations import Products

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "device": "cpu",
        "optimizer": {"type": "adamw", "params": {}},
        "activation_checkpointing": {"every": int(sys.argv[1])},
    }
    if sys.argv[2] == "1":
        config["bf16"] = {"enabled": True}
    with initialize(Products(), config) as engine:
        for _ in range(_STEPS):
            engine.train_step((torch.ones(1, 32, 32),))
        print(private_bytes(), flush=True)


if __name__ == "__main__":
    main()
