"""`engine.monitor` and `deepspeed.monitor`: write the caller's events next to the engine's numbers."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..engine.report.monitors import begin_wandb
from . import comm

Event = tuple[str, Any, int]  # name, value, step
Write = Callable[[str, Any, int], None]


class MonitorMaster:
    """All monitors of a config. Only rank 0 writes, to those whose section is on."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        is_writer = not comm.is_initialized() or comm.get_rank() == 0
        kinds = {"tensorboard": _to_tensorboard, "wandb": _to_wandb, "csv_monitor": _to_tables}
        sections = [(begin, getattr(monitor_config, name)) for name, begin in kinds.items()]
        self._writes: list[Write] = [begin(section) for begin, section in sections if section.enabled and is_writer]

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events of (name, value, step) to all monitors."""
        for event in event_list:
            for write in self._writes:
                write(*event)


def _to_tensorboard(section: Any) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(_folder_of(section)))

    def write(name: str, value: Any, step: int) -> None:
        writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _to_wandb(section: Any) -> Write:
    """Write to this process's run. The engine has started it if its section is on."""
    run = getattr(sys.modules.get("wandb"), "run", None) or begin_wandb(section, {})
    return lambda name, value, step: run.log({name: value}, step=step)


def _to_tables(section: Any) -> Write:
    """Write a CSV table of (step, value) for each name. "Train/loss" goes to Train_loss.csv."""
    folder = _folder_of(section)

    def write(name: str, value: Any, step: int) -> None:
        path = folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            if is_new:
                table.writerow(["step", name.rpartition("/")[2]])
            table.writerow([step, float(value)])

    return write


def _folder_of(section: Any) -> Path:
    folder = Path(section.output_path, section.job_name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
