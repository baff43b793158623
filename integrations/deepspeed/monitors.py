"""`engine.monitor` and `deepspeed.monitor`: write the caller's events next to the engine's numbers."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..engine.report.monitors import begin_wandb
from . import comm

Event = tuple[str, Any, int]  # name, value, step


class Monitor:
    """A writer for a section of the config, with its keys as attributes. Only rank 0 writes, if the section is on."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self._is_writer = monitor_config.enabled and (not comm.is_initialized() or comm.get_rank() == 0)
        if self._is_writer:
            self._open()

    def __getattr__(self, name: str) -> Any:
        if name == "monitor_config" or not hasattr(self.monitor_config, name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.monitor_config, name)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, step in event_list if self._is_writer else ():
            self._write(name, value, step)

    def _open(self) -> None:
        raise NotImplementedError

    def _write(self, name: str, value: Any, step: int) -> None:
        raise NotImplementedError

    def _folder(self) -> Path:
        folder = Path(self.monitor_config.output_path, self.monitor_config.job_name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class TensorBoardMonitor(Monitor):
    """Writes event files by `summary_writer`."""

    summary_writer: Any = None

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer = SummaryWriter(str(self._folder()))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        super().write_events(event_list)
        if flush:
            self.flush()

    def _write(self, name: str, value: Any, step: int) -> None:
        self.summary_writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(Monitor):
    """Writes to this process's wandb run. The engine has started it if its section is on."""

    _run: Any = None

    def _open(self) -> None:
        # The engine may have begun a run: its numbers and the caller's events belong together.
        begun = getattr(sys.modules.get("wandb"), "run", None)
        self._run = begun or begin_wandb(self.monitor_config, {})

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if self._run is not None:
            self._run.log(data, step=step, commit=commit)

    def _write(self, name: str, value: Any, step: int) -> None:
        self.log({name: value}, step=step)


class csvMonitor(Monitor):  # DeepSpeed's name
    """Writes a CSV table of (step, value) for each name. "Train/loss" goes to Train_loss.csv."""

    log_dir: Path | None = None

    def _open(self) -> None:
        self.log_dir = self._folder()

    def _write(self, name: str, value: Any, step: int) -> None:
        assert self.log_dir is not None
        path = self.log_dir / (name.replace("/", "_").replace(" ", "_") + ".csv")
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            if is_new:
                table.writerow(["step", name.rpartition("/")[2]])
            table.writerow([step, float(value)])


class MonitorMaster:
    """All monitors of a config: `tb_monitor`, `wandb_monitor` and `csv_monitor`."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events of (name, value, step) to all monitors."""
        events = list(event_list)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            monitor.write_events(events)
