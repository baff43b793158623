"""What a rank takes beside its tensors: interpreter, torch's libraries' own data, threads, an engine's objects.

python -m lowtide.engine.measuring.process       trains a model of a few bytes, and prints what the process takes
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_KIB = 1024
_STEPS = 3


def process_bytes() -> dict[str, int]:
    """{"rank": private bytes of a process that trains next to nothing}; {} where the system does not say."""
    if not _STATUS.exists():
        return {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, "-m", "lowtide.engine.measuring.process"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.split()
    return {"rank": int(lines[-1])} if done.returncode == 0 and lines else {}


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

    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 0, "device": "cpu"}
    with initialize(Small(2), {**config, "optimizer": {"type": "adamw", "params": {}}}) as engine:
        for _ in range(_STEPS):
            engine.train_step((torch.ones(1, 16),))
        print(private_bytes())


if __name__ == "__main__":
    main()
