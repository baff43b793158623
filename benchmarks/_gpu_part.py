"""Measures parts of benchmarks/gpu.sh in this process: `_gpu_part.py JOB`, as gpu.py calls it."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import _device
import _ranks
from _gpu_record import Record

_DUMP_SECONDS = 15.0  # before it is cut off a process writes where it is


def main(job: dict[str, Any]) -> int:
    """job: "folder", "parts", "only", "limit_seconds"."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks of a job are stopped too
    faulthandler.dump_traceback_later(max(1.0, job["limit_seconds"] - _DUMP_SECONDS))
    for part in job["parts"]:
        with contextlib.suppress(Exception):  # it comes again where the part is measured
            importlib.import_module(f"_gpu_{part}")
    gc.freeze()  # what imports have made stays: collections between trainings need not go through it
    if _device.is_rehearsal():
        _ranks.fork_ranks()
    _device.prepare()
    settings = {
        "date": datetime.date.today().isoformat(),
        "device": _device.name(),
        "versions": _device.versions(),
        "rehearsal": _device.is_rehearsal(),
    }
    num_failures = 0
    for part in job["parts"]:
        record = Record(Path(job["folder"]), part, settings, job["only"], job["limit_seconds"])
        with record.measuring(part):
            importlib.import_module(f"_gpu_{part}").measure(record)
        record.end()
        num_failures += len(record.failures)
    return 1 if num_failures else 0


if __name__ == "__main__":
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # [Note: Leaving] in _worker.py
