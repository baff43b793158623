"""Measure this machine with several numbers of ranks, for the file of `measured.py`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ....watch.stacks import end_with_parent
from ..measured import Curve, Measured, Speeds, curve

COUNTS = (1, 2, 4)
_TIMEOUT_SECONDS = 300.0
_LAUNCH = (sys.executable, "-c", "import sys; from lowtide.bin.main import main; sys.exit(main())", "launch")
_NO_DEVICES = ("--env", "CUDA_VISIBLE_DEVICES=", "--env", "HIP_VISIBLE_DEVICES=")


def measure(say: Callable[[str], None], folder: Path | None, counts: Sequence[int] = COUNTS) -> Measured:
    """Measure with each of `counts` ranks working at the same time, in ascending order.

    Raises ChildProcessError if a rank of a measurement failed, or did not end in time.

    folder: measure files in it too. say: takes a line for each measurement that begins. With more ranks than cores, the
    speeds of computing are scaled from the smaller count, and only collectives and host times are measured.
    """
    found: dict[int, Speeds] = {}
    for count in counts:
        smaller = [speeds for fewer, speeds in found.items() if num_cores() <= fewer < count]
        # More ranks than cores take turns, so their speeds follow from those of fewer ranks.
        known = smaller[-1].slower(count).computing if smaller else {}
        found[count] = _of_ranks(count, folder, known, lambda text, count=count: say(f"{count} ranks: {text}"))  # type: ignore[misc]
    about = {
        "processor": platform.processor() or platform.machine(),
        "cores": num_cores(),
        "torch": torch.__version__,
        "lowtide": metadata.version("lowtide"),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return Measured(found, about=about)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _of_ranks(count: int, folder: Path | None, known: Mapping[str, Curve], say: Callable[[str], None]) -> Speeds:
    """Measure in `count` ranks of `lowtide launch`, without accelerators."""
    with tempfile.TemporaryDirectory(prefix="lowtide-measure-") as name:
        request, errors = Path(name) / "request.json", Path(name) / "errors.txt"
        seconds = {name: curve.points for name, curve in known.items()}
        asked = {"folder": None if folder is None else str(folder), "seconds": seconds}
        request.write_text(json.dumps(asked), encoding="utf-8")
        ranks = ["--transport", "local", "--nproc", str(count), "--quiet-ranks", "--no-preflight", *_NO_DEVICES]
        command = [*_LAUNCH, *ranks, "-m", "lowtide.engine.plan.measuring.rank", str(request)]
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream, preexec_fn=end_with_parent
            )
        assert process.stdout is not None
        begun = time.monotonic()
        # Reading the output below has no timeout.
        late = threading.Timer(_TIMEOUT_SECONDS, process.terminate)
        late.start()
        try:
            for line in process.stdout:  # of rank 0
                say(line.decode(errors="replace").strip())
            status = process.wait()
        finally:
            late.cancel()
            process.terminate()  # if this process is interrupted: the launcher then stops all ranks
            process.wait()
            process.stdout.close()
        if status:
            why = errors.read_text(errors="replace").strip() or "no output"
            if time.monotonic() - begun >= _TIMEOUT_SECONDS:
                why = f"not done after {_TIMEOUT_SECONDS:g} s; measure again when the machine is idle"
            raise ChildProcessError(f"{count} ranks: {why}")
        return mean([json.loads((request.parent / f"rank{rank}.json").read_text()) for rank in range(count)], count)


def mean(found: Sequence[Mapping[str, Any]], ranks: int) -> Speeds:
    """Average the curves of ranks that worked at the same time."""
    curves = {}
    for name, points in found[0]["seconds"].items():
        of_ranks = [of_rank["seconds"][name] for of_rank in found]
        curves[name] = curve(
            [
                (size, sum(points[place][1] for points in of_ranks) / len(of_ranks))
                for place, (size, _) in enumerate(points)
            ]
        )
    return Speeds(ranks, int(found[0]["threads"]), curves)
