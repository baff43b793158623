"""The parts of benchmarks/gpu.sh, and what they have measured: results.json, and results.md with rows for the docs.

Both are written after each number, so that a part that is cut off leaves what it had. No part is forgotten when
another one is measured into the same folder. Imported it needs no torch; `_gpu_part.py JOB` measures parts in this
process, as gpu.py calls it.
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
    "checks": "_gpu_kernels:check",
    "training": "_gpu_training:measure",
    "trace": "_gpu_trace:measure",
    "bandwidth": "_gpu_kernels:measure",
    "models": "_gpu_models:measure",
    "largest": "_gpu_models:measure_largest",
    "ranks": "_gpu_splits:measure_ranks",
    "splits": "_gpu_splits:measure",
    "compiled": "_gpu_training:measure_compiled",
}
"""The function of each part, in their order."""

JSON_FILE = "results.json"
MARKDOWN_FILE = "results.md"

RUNNING = "running"
"""The status of a part from its start on: not "done", nor "failed", nor in words how it was cut off."""

_DUMP_SECONDS = 15.0  # before it is cut off a process writes where it is

Cell = str | int | float | None


class Record:
    """One part's. settings: "date", "device", "versions", and "rehearsal", whether the numbers mean nothing.

    only: what has none of these texts in its name is not measured. limit_seconds: for the part.
    """

    def __init__(
        self, folder: Path, part: str, settings: Mapping[str, Any], only: Sequence[str], limit_seconds: float
    ) -> None:
        self.folder = folder
        self._part = part
        self._only = only
        self._started = time.monotonic()
        self._deadline = self._started + limit_seconds
        self._found = nothing(settings)
        self._write()

    @property
    def left_seconds(self) -> float:
        """Until the part is cut off."""
        return self._deadline - time.monotonic()

    def job_seconds(self, most_seconds: float) -> float:
        """The limit of one job; in a rehearsal, whose machine may be slow and busy, what is left of the part."""
        left = self.left_seconds - 5
        return left if self._found["settings"]["rehearsal"] else min(left, most_seconds)

    def wants(self, name: str, least_seconds: float = 0.0) -> bool:
        """Whether what has this name is to be measured. A note says so where too little time is left for it."""
        if self._only and not any(text in name for text in self._only):
            return False
        if self.left_seconds < least_seconds:
            self.note(f"{name}: no time was left; `benchmarks/gpu.sh {self._part} --only '{name}'`")
            return False
        return True

    @property
    def failures(self) -> list[str]:
        found: list[str] = self._found["failures"]
        return found

    def add(self, table: str, **cells: Cell) -> None:
        """A row; `cells` by the names of columns, `_` for a space."""
        row = {name.replace("_", " "): value for name, value in cells.items()}
        self._found["tables"].setdefault(table, []).append(row)
        print(
            f"{self._part}: {table}: " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True
        )
        self._write()

    def note(self, text: str) -> None:
        """What the reader of the rows must know: what is not measured here and why, what was refused."""
        self._found["notes"].append(text)
        print(f"{self._part}: {text}", flush=True)
        self._write()

    def fail(self, what: str, reason: str) -> None:
        self.failures.append(f"{what}: {reason}")
        print(f"{self._part}: FAILED: {what}: {reason}", flush=True)
        self._write()

    @contextlib.contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """An error within it is a failure of that alone."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(what, one_line(error))

    def end(self) -> None:
        if self._only and not self._found["tables"]:
            self.note(f"nothing was measured: no name has one of {', '.join(self._only)}")
        self._found["status"] = "failed" if self.failures else "done"
        self._write()

    def _write(self) -> None:
        self._found["seconds"] = round(time.monotonic() - self._started, 1)
        change(self.folder, self._part, self._found)


def nothing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a part has found at its start."""
    return {
        "status": RUNNING,
        "seconds": 0.0,
        "settings": dict(settings),
        "tables": {},
        "notes": [],
        "failures": [],
    }


def one_line(error: BaseException) -> str:
    """An error in a line: its class and what it says first."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:400]}"


def read(folder: Path) -> dict[str, Any]:
    """What each part has found so far, by its name."""
    path = folder / JSON_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def change(folder: Path, part: str, found: Mapping[str, Any]) -> None:
    """Writes what a part has found beside that of the others. A process that ends here leaves the old files."""
    parts = read(folder) | {part: dict(found)}
    _replace(folder / JSON_FILE, json.dumps(parts, indent=1) + "\n")
    _replace(folder / MARKDOWN_FILE, "\n".join(line for name in parts for line in markdown(name, parts[name])))


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def markdown(part: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a part."""
    settings = found["settings"]
    yield from (f"### {part}", "")
    if settings:
        versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
        how = "A rehearsal: the numbers mean nothing. On" if settings["rehearsal"] else "Measured on"
        yield from (f"{how} {settings['date']}, {settings['device']}; {versions}. {found['seconds']} s.", "")
    for title, rows in found["tables"].items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        yield from (f"{title}:", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")
        for row in rows:
            yield f"| {' | '.join(shown(row.get(name)) for name in columns)} |"
        yield ""
    for note in found["notes"]:
        yield f"- {note}"
    for failure in found["failures"]:
        yield f"- **FAILED**: {failure}"
    if found["status"] not in ("done", "failed"):
        yield f"- {found['status']}: what is above was measured before"
    if found["notes"] or found["failures"] or found["status"] not in ("done", "failed"):
        yield ""


def shown(value: Cell) -> str:
    """A cell as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def main(job: dict[str, Any]) -> int:
    """job: "folder", "parts", "only", "limit_seconds"."""
    import _device

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks of a job are stopped too
    faulthandler.dump_traceback_later(max(1.0, job["limit_seconds"] - _DUMP_SECONDS))
    for part in job["parts"]:
        with contextlib.suppress(Exception):  # it comes again where the part is measured
            importlib.import_module(MEASURES[part].split(":")[0])
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
        record = Record(Path(job["folder"]), part, settings, job["only"], job["limit_seconds"])
        with record.measuring(part):
            module, function = MEASURES[part].split(":")
            getattr(importlib.import_module(module), function)(record)
        record.end()
        num_failures += len(record.failures)
    return 1 if num_failures else 0


if __name__ == "__main__":
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # [Note: Leaving] in _worker.py
