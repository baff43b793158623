"""The parts of benchmarks/gpu.sh, and what they have measured, results.json.

It is written after each number, so that a part that is cut off leaves what it had. A part that is measured again
replaces its old numbers alone. Importing this file needs no torch; `_gpu_part.py JOB` measures parts in this process.
"""

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
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURES = {
    "checks": "_gpu_parts:check",
    "training": "_gpu_parts:train",
    "trace": "_gpu_parts:trace",
    "models": "_gpu_parts:compare_models",
    "splits": "_gpu_splits:compare_splits",
}
"""The module and function of each part, in their order."""

JSON_FILE = "results.json"
RUNNING = "running"  # the status of a part from its start to its end
NOTHING: dict[str, Any] = {"status": RUNNING, "seconds": 0.0, "settings": {}, "tables": {}, "notes": [], "failures": []}

_DUMP_SECONDS = 15.0  # before it is cut off a process writes where it is

Cell = str | int | float | None


class Record:
    """The findings of a part. `only` restricts it to names that contain one of these texts.

    settings: "date", "device", "versions", and "rehearsal", whether the numbers mean nothing.
    """

    def __init__(self, folder: Path, part: str, settings: Mapping[str, Any], only: Sequence[str]) -> None:
        self.folder = folder
        self._part = part
        self._only = only
        self._started = time.monotonic()
        self._found = {**NOTHING, "settings": dict(settings), "tables": {}, "notes": [], "failures": []}
        self._write(f"begins at {settings['date']}")

    def wants(self, name: str) -> bool:
        """Return whether to measure something of this name."""
        return not self._only or any(text in name for text in self._only)

    @property
    def failures(self) -> list[str]:
        found: list[str] = self._found["failures"]
        return found

    def add(self, table: str, **cells: Cell) -> None:
        """Add a row. The names of `cells` are the columns, `_` stands for a space."""
        row = {name.replace("_", " "): value for name, value in cells.items()}
        self._found["tables"].setdefault(table, []).append(row)
        self._write(f"{table}: " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()))

    def note(self, text: str) -> None:
        """Add a line that a reader of the rows must know."""
        self._found["notes"].append(text)
        self._write(text)

    def fail(self, what: str, reason: str) -> None:
        self.failures.append(f"{what}: {reason}")
        self._write(f"FAILED: {what}: {reason}")

    @contextlib.contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """Turn an error inside into a failure of `what` alone."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(what, one_line(error))

    def end(self) -> None:
        if self._only and not self._found["tables"]:
            self.note(f"nothing was measured: no name has one of {', '.join(self._only)}")
        self._found["status"] = "failed" if self.failures else "done"
        self._write(str(self._found["status"]))

    def _write(self, said: str) -> None:
        print(f"{self._part}: {said}", flush=True)
        self._found["seconds"] = round(time.monotonic() - self._started, 1)
        change(self.folder, self._part, self._found)


def one_line(error: BaseException) -> str:
    """Return the class of an error and the beginning of its text in one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:400]}"


def read(folder: Path) -> dict[str, Any]:
    """Return the findings so far, by part."""
    path = folder / JSON_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def change(folder: Path, part: str, found: Mapping[str, Any]) -> None:
    """Replace the findings of a part; a process that ends here leaves the old file."""
    new = folder / f".{JSON_FILE}.{os.getpid()}"
    new.write_text(json.dumps(read(folder) | {part: dict(found)}, indent=1) + "\n")
    new.replace(folder / JSON_FILE)


def shown(value: Cell) -> str:
    """Return a cell as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def main(job: dict[str, Any]) -> int:
    """Measure parts. job: "folder", "parts", "only", "limit_seconds"."""
    import _device

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks of a job are stopped too
    faulthandler.dump_traceback_later(max(1.0, job["limit_seconds"] - _DUMP_SECONDS))
    modules = {part: importlib.import_module(MEASURES[part].split(":")[0]) for part in job["parts"]}
    gc.freeze()  # what imports have made stays: collections between trainings need not go through it
    _device.prepare()
    settings = {
        "date": datetime.date.today().isoformat(),
        "device": _device.name(),
        "versions": _device.versions(),
        "rehearsal": _device.is_rehearsal(),
    }
    num_failures = 0
    for part in job["parts"]:
        record = Record(Path(job["folder"]), part, settings, job["only"])
        with record.measuring(part):
            getattr(modules[part], MEASURES[part].split(":")[1])(record)
        record.end()
        num_failures += len(record.failures)
    return 1 if num_failures else 0


if __name__ == "__main__":
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # [Note: Leaving] in _worker.py
