"""The parts of benchmarks/gpu.sh, and what they have measured, results.json.

It is written after each number, so that a part that is cut off leaves what it had, and the next run of the part goes on
there. A part that was done is measured again, as is one of another checkout, device or version. Importing this file
needs no torch; `_gpu_part.py JOB` measures a part in this process.
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
from typing import Any, NamedTuple


class Part(NamedTuple):
    """function: as "module:name", is called with a `Record`. seconds: that it gets by default, with its imports."""

    function: str
    seconds: float


PARTS = {
    "language_models": Part("_gpu_language_models:compare", 420.0),
    "checks": Part("_gpu_parts:check", 120.0),
    "training": Part("_gpu_parts:train", 150.0),
}
"""By their value; all together take less than a quarter of an hour."""

JSON_FILE = "results.json"
RUNNING, DONE = "running", "done"
NOTHING: dict[str, Any] = {
    "status": RUNNING,
    "seconds": 0.0,  # of all runs
    "settings": {},
    "measured": [],  # names, also of what failed
    "tables": {},
    "notes": [],
    "failures": [],
}
OUT_OF_TIME_STATUS = 3  # of this process: rows are left
LEAVING_SECONDS = 15.0  # before a part is cut off, it begins nothing more

Cell = str | int | float | None


class OutOfTime(Exception):
    """The part's time is over within a measurement, which the next run repeats."""


class Record:
    """The findings of a part. `only` restricts it to names that contain one of these texts.

    settings: "date", "device", "versions", and "rehearsal", whether the numbers mean nothing. What was found with the
    same settings is kept. seconds: of the part, from now.
    """

    def __init__(
        self, folder: Path, part: str, settings: Mapping[str, Any], only: Sequence[str], seconds: float = 1e9
    ) -> None:
        self.folder = folder
        self._part = part
        self._only = only
        self.left: list[str] = []  # names that the next run measures
        old = read(folder).get(part, NOTHING)
        is_kept = old["status"] == RUNNING and undated(old["settings"]) == undated(settings)
        self._found = json.loads(json.dumps(old if is_kept else NOTHING)) | {"settings": dict(settings)}
        self._started = time.monotonic() - self._found["seconds"]
        self._ends = time.monotonic() + seconds
        self._write(f"{'goes on' if self._found['measured'] else 'begins'} at {settings['date']}")

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._ends - time.monotonic() - LEAVING_SECONDS)

    @property
    def failures(self) -> list[str]:
        found: list[str] = self._found["failures"]
        return found

    def wants(self, name: str) -> bool:
        """Return whether to measure what has this name now: it is asked for and not measured yet, and there is time."""
        if (self._only and not any(text in name for text in self._only)) or name in self._found["measured"]:
            return False
        if self.seconds_left == 0.0:
            self.left.append(name)
        return self.seconds_left > 0.0

    def add(self, table: str, **cells: Cell) -> None:
        """Add a row. The names of `cells` are the columns, `_` stands for a space."""
        row = {name.replace("_", " "): value for name, value in cells.items()}
        self._found["tables"].setdefault(table, []).append(row)
        self._write(f"{table}: " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()))

    def note(self, text: str) -> None:
        """Add a line that a reader of the rows must know."""
        if text not in self._found["notes"]:
            self._found["notes"].append(text)
        self._write(text)

    def fail(self, what: str, reason: str) -> None:
        self.failures.append(f"{what}: {reason}")
        self._write(f"FAILED: {what}: {reason}")

    @contextlib.contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """Turn an error inside into a failure of `what` alone, which is not measured again."""
        try:
            yield
        except OutOfTime:
            self.left.append(what)
            return
        except Exception as error:
            traceback.print_exc()
            self.fail(what, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        self._found["measured"].append(what)

    def end(self) -> None:
        if self._only and not self._found["tables"]:
            self.note(f"nothing was measured: no name has one of {', '.join(self._only)}")
        if self.left:  # the status stays: the next run goes on
            self._write(f"out of time, left for the next run: {'; '.join(self.left)}")
            return
        self._found["status"] = "failed" if self.failures else DONE
        self._write(str(self._found["status"]))

    def _write(self, said: str) -> None:
        print(f"{self._part}: {said}", flush=True)
        self._found["seconds"] = round(time.monotonic() - self._started, 1)
        change(self.folder, self._part, self._found)


def undated(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "date"}


def read(folder: Path) -> dict[str, Any]:
    """Return the findings so far, by part."""
    path = folder / JSON_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def change(folder: Path, part: str, found: Mapping[str, Any]) -> None:
    """Replace the findings of a part; a process that ends here leaves the old file."""
    new = folder / f".{JSON_FILE}.{os.getpid()}"
    new.write_text(json.dumps(read(folder) | {part: dict(found)}, indent=1) + "\n")
    new.replace(folder / JSON_FILE)


def begin(folder: Path, part: str) -> None:
    """Note that a part runs from now on; what it found is kept, unless it had come to its end."""
    old = read(folder).get(part, NOTHING)
    change(folder, part, NOTHING if old["status"] in (DONE, "failed") else {**old, "status": RUNNING})


def shown(value: Cell) -> str:
    """Return a cell as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def main(job: dict[str, Any]) -> int:
    """Measure a part. job: "folder", "part", "only", "seconds"."""
    ends = time.monotonic() + job["seconds"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks of a job are stopped too
    faulthandler.dump_traceback_later(max(1.0, job["seconds"] - LEAVING_SECONDS))
    module, function = PARTS[job["part"]].function.split(":")
    measure = getattr(importlib.import_module(module), function)
    import _device

    gc.freeze()  # what imports have made stays: collections between trainings need not go through it
    _device.prepare()
    settings = {
        "date": datetime.date.today().isoformat(),
        "device": _device.name(),
        "versions": _device.versions(),
        "rehearsal": _device.is_rehearsal(),
    }
    record = Record(Path(job["folder"]), job["part"], settings, job["only"], ends - time.monotonic())
    with record.measuring(job["part"]):
        measure(record)
    record.end()
    return OUT_OF_TIME_STATUS if record.left else int(bool(record.failures))


if __name__ == "__main__":
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # [Note: Leaving] in _worker.py
