"""Numbers of each step for the monitors of the config: loss, rates, memory, seconds by phase."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from ...offload import OnHost
from ...watch.log import logger
from ...watch.timeline import Timeline
from ..archive.agreement import no_rank_alone
from ..config.config import Config
from ..config.sections import CsvMonitorConfig, TensorboardConfig, WandbConfig
from ..model.model_flops import ModelFlops
from ..step.batch import tokens_in
from ..step.features import StepFeature, StepResult
from ..step.parts import Parts
from .memory import measure

Row = Mapping[str, float]
RUN = "run.json"
"""About a run: job, script, last start, number of ranks, and the config without defaults."""


class Writer(Protocol):
    """Writes the numbers of a step, by name. Unknown numbers are missing.

    After a restart from a checkpoint, steps may come again: the new step replaces the old step and all steps after it.
    """

    name: str

    def write(self, step: int, row: Row) -> None: ...

    def close(self) -> None: ...


def writers_for(config: Config, columns: Sequence[str], num_ranks: int) -> list[Writer]:
    """Return the writers that are on. Raise ValueError if a package is missing."""
    found: list[Writer] = []
    if config.tensorboard.enabled:
        found.append(TensorboardWriter(config.tensorboard))
    if config.wandb.enabled:
        found.append(WandbWriter(config.wandb, config.as_dict()))
    if config.csv_monitor.enabled:
        found.append(CsvWriter(config, columns, num_ranks))
    return found


class TensorboardWriter:
    """Writes event files."""

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
            # purge_step hides the events of steps that come again.
            self._writer = self._class(str(self._folder), purge_step=step)
        self._last = step
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbWriter:
    """Writes to a run of wandb."""

    name = "wandb"

    def __init__(self, config: WandbConfig, settings: Mapping[str, Any]) -> None:
        """settings: of the training, for display."""
        self._begin = partial(begin_wandb, config, settings)
        self._run = self._begin()
        self._last = 0

    def write(self, step: int, row: Row) -> None:
        if step <= self._last:  # a run takes no earlier steps: a new run has them, as after a restart
            self.close()
            self._run = self._begin()
        self._last = step
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


def begin_wandb(config: WandbConfig, settings: Mapping[str, Any]) -> Any:
    """Begin a run of wandb, offline without a login. Raise ValueError if the package is missing."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", error) from error
    # Without a login wandb would ask for a key, and a job without a terminal would wait or fail.
    mode: Any = os.environ.get("WANDB_MODE")
    if mode is None and not _is_logged_in(wandb):
        mode = "offline"
        logger.info("wandb: not logged in, the run is written to files: `wandb sync` uploads them")
    return wandb.init(
        project=config.project,
        group=config.group,
        entity=config.team,
        config=dict(settings),
        mode=mode,
    )


def _is_logged_in(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # an older version, whose `login` has no `prompt`
        return bool(wandb.api.api_key)


class CsvWriter:
    """Writes `metrics.csv`, a row for each step, after the rows of an earlier run of the same job; and `run.json`."""

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
        """Keep the complete rows of earlier steps, with the present columns."""
        kept: list[dict[str, str]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                # A killed run may have left half a row, in which the reader sets the missing values to None.
                kept = [row for row in csv.DictReader(file) if None not in row.values() and _is_before(row, step)]
        new = self._path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            # An earlier version may have written other columns.
            table = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            table.writeheader()
            table.writerows(kept)
        new.replace(self._path)


def _is_before(row: Mapping[str, str], step: int) -> bool:
    return row.get("step", "").isdigit() and int(row["step"]) < step


def _made(name: str, config: TensorboardConfig | CsvMonitorConfig) -> Path:
    """Make the folder of a job. Raise ValueError if it is not writable."""
    folder = Path(config.output_path, config.job_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asked now, since an error at the first row would come after the first step.
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise ValueError(
            f"{name}.output_path: expected a folder that rank 0 can write into, found {error}; set another folder, or "
            f"{name}.enabled false"
        ) from error
    return folder


def _missing(package: str, error: ImportError) -> ValueError:
    return ValueError(
        f"{package}.enabled: expected the package {package}, found that it cannot be imported ({error}); pip install "
        f"{package}, or set csv_monitor, which needs no package"
    )


_PHASES = ("data", "forward", "backward", "pipeline", "update", "wait")
COLUMNS = (
    *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "loss_scale", "skipped")),
    *(f"speed/{name}" for name in ("step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu")),
    *(f"memory/{name}" for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")),
    *(f"seconds/{phase}" for phase in _PHASES),
)
"""Names of the numbers, in the order of a table."""


class Monitors(StepFeature):
    """Computes the numbers on rank 0. A step is written when the next step ends, so the host waits for no device.

    tflops: per rank: operations of the model (`ModelFlops`) / ranks / seconds.
    """

    def __init__(self, writers: Sequence[Writer], flops: ModelFlops, parts: Parts) -> None:
        self._writers = list(writers)
        # Seconds by phase alone: the spans of a whole training would fill the memory.
        self._timeline = Timeline(parts.mesh.world.progress, keeps_spans=False)
        self._flops = flops
        self._parts = parts
        self._begun = time.perf_counter()
        self._sizes: dict[int, tuple[int, int]] = {}  # rows and length of each microbatch of a step
        self._waiting: tuple[int, dict[str, float], dict[str, OnHost]] | None = None

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return None without monitors (`Config.has_monitors`), and on other ranks.

        Raises ValueError if a package is missing or a folder is not writable, and on other ranks RuntimeError.
        """
        flops, world = parts.model_flops, parts.mesh.world
        if flops is None:
            return None
        # All ranks come here, although only rank 0 has writers: a missing package must end the start on every rank.
        with no_rank_alone(world, "lowtide.initialize"):
            writers = writers_for(parts.config, COLUMNS, world.size) if world.rank == 0 else []
        if not writers:
            return None
        if not flops.attention_width:
            logger.info(
                "monitors: speed/tflops counts no attention: no layer has a name of query projections (q_proj, qkv, "
                "query_key_value, c_attn, ...)"
            )
        return cls(writers, flops, parts)

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Note the size of each microbatch. It may come several times, also in part: the largest part counts."""
        if torch.is_grad_enabled():
            for at, batch in enumerate(batches, self._parts.steps.accumulated.num_microbatches):
                self._sizes[at] = max(self._sizes.get(at, (0, 0)), tokens_in(batch), key=math.prod)

    def after_step(self, step: int, result: StepResult) -> None:
        parts, config = self._parts, self._parts.config
        memory = measure(parts.runner.passes.units, parts.optimizer)
        now = time.perf_counter()
        seconds, self._begun = max(now - self._begun, 1e-9), now
        numbers: dict[str, float] = {
            "train/lr": result.lr,
            "train/loss_scale": result.loss_scale,
            "train/skipped": float(result.skipped),
            "speed/step_seconds": seconds,
            **{f"memory/{key}": value for key, value in asdict(memory).items()},
            **{f"seconds/{phase}": spent for phase, spent in self._timeline.take_seconds().items()},
        }
        if parts.samples_per_step is not None:
            numbers["speed/samples_per_second"] = parts.samples_per_step / seconds
        given = [
            # Rank 0 knows its batch alone. The other data-parallel ranks are taken to have as many tokens.
            (rows * length * parts.mesh.data_size, length)
            for rows, length in self._sizes.values()
            if rows * length
        ]
        self._sizes.clear()
        if given:
            numbers["speed/tokens_per_second"] = sum(tokens for tokens, _ in given) / seconds
            flops = sum(self._flops.of_tokens(tokens, length) for tokens, length in given)
            numbers["speed/tflops"] = flops / parts.mesh.world.size / seconds / 1e12
            if config.profile.peak_tflops is not None:
                numbers["speed/mfu"] = numbers["speed/tflops"] / config.profile.peak_tflops
        # The row of the step before: its loss and norm have reached the host by now, so nobody waits.
        self.before_save()
        tensors = {"train/loss": result.loss, "train/grad_norm": result.grad_norm}
        self._waiting = (step, numbers, {name: OnHost(one) for name, one in tensors.items() if one is not None})

    def close(self) -> None:
        self._timeline.stop()
        self.before_save()
        # Taken out first, as in `_try`.
        writers, self._writers = self._writers, []
        for writer in writers:
            self._try(writer, writer.close)

    def after_load(self, step: int) -> None:
        self.before_save()

    def before_save(self) -> None:
        """Write the pending step, waiting for the device: a run that continues from here does not write it again."""
        if self._waiting is None:
            return
        (step, numbers, waiting), self._waiting = self._waiting, None
        found = {name: one.read().item() for name, one in waiting.items()} | numbers
        row: Row = {name: found[name] for name in COLUMNS if name in found}
        for writer in list(self._writers):
            self._try(writer, lambda: writer.write(step, row))  # noqa: B023  (called at once)

    def _try(self, writer: Writer, write: Callable[[], None]) -> None:
        """Call `write`. A full disk or a lost service must not end a training."""
        try:
            write()
        except Exception as error:
            logger.error("%s: writing failed, nothing more is written there: %s", writer.name, error)
            if writer in self._writers:
                # Removed first: `close` of a broken writer may fail too, and must not be tried again.
                self._writers.remove(writer)
                self._try(writer, writer.close)
