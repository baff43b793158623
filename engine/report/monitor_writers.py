"""Where monitors write: TensorBoard, Weights & Biases, a table. Their packages are imported where one is asked for."""

from __future__ import annotations

import csv
import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ...watch.log import logger
from ..config.config import Config
from ..config.monitors import CsvMonitorConfig, TensorboardConfig, WandbConfig

Row = Mapping[str, float]
RUN = "run.json"
"""What a run is: its job, script, last start, ranks, and what its config says other than the defaults."""


class Writer(Protocol):
    """Takes the numbers of a step, by name; those that are not known are left out.

    A step that has been written before, by a job that was ended after its last checkpoint, takes the place of that one
    and of all behind it.
    """

    name: str

    def write(self, step: int, row: Row) -> None: ...

    def close(self) -> None: ...


def writers_for(config: Config, columns: Sequence[str], num_ranks: int) -> list[Writer]:
    """Those that are on. Raises ValueError where the package of one is missing."""
    found: list[Writer] = []
    if config.tensorboard.enabled:
        found.append(TensorboardWriter(config.tensorboard))
    if config.wandb.enabled:
        found.append(WandbWriter(config.wandb, config.as_dict()))
    if config.csv_monitor.enabled:
        found.append(CsvWriter(config, columns, num_ranks))
    return found


class TensorboardWriter:
    """Event files."""

    name = "tensorboard"

    def __init__(self, config: TensorboardConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self._folder = _made("tensorboard", config)
        self._class = SummaryWriter
        self._writer: Any = None
        self._last = 0

    def write(self, step: int, row: Row) -> None:
        if self._writer is None or step <= self._last:
            self.close()
            self._writer = self._class(str(self._folder), purge_step=step)
        self._last = step
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbWriter:
    """A run of wandb."""

    name = "wandb"

    def __init__(self, config: WandbConfig, settings: Mapping[str, Any]) -> None:
        """settings: of the training, which are shown with the run."""
        self._run = begin_wandb(config, settings)

    def write(self, step: int, row: Row) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


def begin_wandb(config: WandbConfig, settings: Mapping[str, Any]) -> Any:
    """A run of wandb, offline where nobody has logged in. Raises ValueError where the package is missing."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", error) from error
    mode: Any = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.api.api_key:
        mode = "offline"
        logger.info("wandb: nobody is logged in, the run is kept in files: `wandb sync` sends them")
    return wandb.init(
        project=config.project,
        group=config.group,
        entity=config.team,
        config=dict(settings),
        mode=mode,
    )


class CsvWriter:
    """`metrics.csv`: a row for each step, behind those of an earlier run of the same job; and `run.json` beside it."""

    name = "csv_monitor"

    def __init__(self, config: Config, columns: Sequence[str], num_ranks: int) -> None:
        folder = _made("csv_monitor", config.csv_monitor)
        self._about = {
            "job": config.csv_monitor.job_name,
            "script": Path(sys.argv[0]).name,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "ranks": num_ranks,
            "config": config.model_dump(mode="json", exclude_defaults=True),
        }
        self._path = folder / "metrics.csv"
        self._columns = ["step", *columns]
        self._file: Any = None
        self._last = 0

    def write(self, step: int, row: Row) -> None:
        if self._file is None or step <= self._last:
            self.close()
            self._keep_before(step)
            self._path.with_name(RUN).write_text(json.dumps(self._about, indent=2) + "\n", encoding="utf-8")
            self._file = self._path.open("a", newline="", encoding="utf-8")
        self._last = step
        csv.DictWriter(self._file, self._columns, restval="").writerow({"step": step, **row})
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _keep_before(self, step: int) -> None:
        """Leaves the whole rows of earlier steps, under the names of today."""
        kept: list[dict[str, str]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                kept = [row for row in csv.DictReader(file) if None not in row.values() and _is_before(row, step)]
        new = self._path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            table.writeheader()
            table.writerows(kept)
        new.replace(self._path)


def _is_before(row: Mapping[str, str], step: int) -> bool:
    return row.get("step", "").isdigit() and int(row["step"]) < step


def _made(name: str, config: TensorboardConfig | CsvMonitorConfig) -> Path:
    """The folder of a job. Raises ValueError where nothing can be written there."""
    folder = Path(config.output_path, config.job_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise ValueError(
            f"{name}.output_path: expected a folder that rank 0 can write into, found {error}; set another, or "
            f"{name}.enabled false"
        ) from error
    return folder


def _missing(package: str, error: ImportError) -> ValueError:
    return ValueError(
        f"{package}.enabled: expected the package {package}, which cannot be imported ({error}); pip install "
        f"{package}, or set csv_monitor, which needs none"
    )
