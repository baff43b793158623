"""Measure this machine with several numbers of ranks, for the file of `measured.py`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
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
from .process import process_bytes

COUNTS = (1, 2, 4)
_TIMEOUT_SECONDS = 300.0
_POLL_SECONDS = 0.05


class MeasuringError(Exception):
    """A rank of a measurement failed, or did not end in time."""


def measure(say: Callable[[str], None], folder: Path | None, counts: Sequence[int] = COUNTS) -> Measured:
    """Measure with each of `counts` ranks working at the same time, in ascending order. Raises MeasuringError.

    folder: measure files in it too. say: takes a line for each measurement that begins. With more ranks than cores, the
    speeds of computing are scaled from the smaller count, and only collectives and host times are measured.
    """
    found: dict[int, Speeds] = {}
    for count in counts:
        smaller = [speeds for fewer, speeds in found.items() if num_cores() <= fewer < count]
        known = smaller[-1].slower(count).computing if smaller else {}
        found[count] = _of_ranks(count, folder, known, lambda text, count=count: say(f"{count} ranks: {text}"))  # type: ignore[misc]
    say("memory of a process")
    about = {
        "processor": platform.processor() or platform.machine(),
        "cores": num_cores(),
        "torch": torch.__version__,
        "lowtide": metadata.version("lowtide"),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    port = _free_port()
    return Measured(found, process_bytes(lambda count, rank: environment_of(count, rank, port)), about=about)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_of(count: int, rank: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, with as many threads as the launcher would give it."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // count)))
    found = {key: value for key, value in os.environ.items() if not key.startswith("LOWTIDE_RECORD")}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": str(rank)}
    return found | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": threads}


def _of_ranks(count: int, folder: Path | None, known: Mapping[str, Curve], say: Callable[[str], None]) -> Speeds:
    with tempfile.TemporaryDirectory(prefix="lowtide-measure-") as name:
        paths = [Path(name) / f"rank{rank}.json" for rank in range(count)]
        port = _free_port()
        processes: list[subprocess.Popen[bytes]] = []
        seconds = {name: curve.points for name, curve in known.items()}
        try:
            for rank, path in enumerate(paths):
                request = path.with_suffix(".request")
                asked = {"out": str(path), "folder": None if folder is None else str(folder), "seconds": seconds}
                request.write_text(json.dumps(asked), encoding="utf-8")
                command = [sys.executable, "-m", "lowtide.engine.plan.measuring.rank", str(request)]
                errors = Path(name) / f"rank{rank}.log"
                with errors.open("wb") as stream:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment_of(count, rank, port),
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=stream,
                            start_new_session=True,
                            preexec_fn=end_with_parent,
                        )
                    )
            reader = threading.Thread(target=_forward_lines, args=(processes[0], say), daemon=True)
            reader.start()
            _wait(processes, [Path(name) / f"rank{rank}.log" for rank in range(count)])
            reader.join()
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return mean([json.loads(path.read_text()) for path in paths], count)


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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _forward_lines(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(line.decode(errors="replace").strip())


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll():
                raise MeasuringError(f"rank {rank} of {len(processes)} failed: {_last_line(logs[rank])}")
        if time.monotonic() > deadline:
            raise MeasuringError(f"{len(processes)} ranks did not end within {_TIMEOUT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise MeasuringError(f"rank {rank} of {len(processes)} failed: {_last_line(logs[rank])}")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
