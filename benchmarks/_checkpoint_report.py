"""What the checkpoint benchmark found: speeds and their ratios, the table, the JSON file and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _checkpoint_contenders import DEEPSPEED, STATE_BYTES_PER_PARAMETER, WEIGHT_BYTES_PER_PARAMETER
from _checkpoint_disk import DiskSpeed
from _checkpoint_job import SaveResult
from _contenders import FSDP2, Contender
from rich.table import Table

MIB = 1024 * 1024


@dataclass(frozen=True)
class Operation:
    """One thing that is timed. plain, direct: the seconds of the disk's own work that it is held against."""

    key: str  # of SaveResult.seconds
    label: str
    bytes_per_parameter: int
    plain: Callable[[DiskSpeed], float]
    direct: Callable[[DiskSpeed], float | None] = lambda disk: None

    @property
    def work_key(self) -> str:
        """The key of SaveResult.extra_bytes and cpu_seconds, which know no difference before and after the return."""
        return self.key.removesuffix(".done")


OPERATIONS = [
    Operation("save.done", "save, on the disk", STATE_BYTES_PER_PARAMETER, lambda d: d.write, lambda d: d.write_direct),
    Operation("save", "save, returned", STATE_BYTES_PER_PARAMETER, lambda d: d.write, lambda d: d.write_direct),
    Operation("load cold", "load, cold", STATE_BYTES_PER_PARAMETER, lambda d: d.read_cold),
    Operation("load warm", "load, warm", STATE_BYTES_PER_PARAMETER, lambda d: d.read_warm),
    Operation("export.done", "export, on the disk", WEIGHT_BYTES_PER_PARAMETER, lambda d: d.write),
    Operation("export", "export, returned", WEIGHT_BYTES_PER_PARAMETER, lambda d: d.write),
]
_IN_CHART = [operation for operation in OPERATIONS if operation.key not in ("save", "export")]


@dataclass
class SaveRow:
    """All jobs of one contender, with the disk's own speed after each; `failure` ends its part."""

    contender: Contender
    num_params: int
    timed: dict[int, SaveResult] = field(default_factory=dict)
    disk: dict[int, DiskSpeed] = field(default_factory=dict)
    memory: SaveResult | None = None
    failure: str | None = None

    def seconds(self, operation: Operation) -> dict[int, float]:
        """The median of each round."""
        return {number: statistics.median(job.seconds[operation.key]) for number, job in self.timed.items()}

    def speeds(self, operation: Operation) -> list[float]:
        """Bytes of state a second, of each round."""
        nbytes = operation.bytes_per_parameter * self.num_params
        return [nbytes / value for value in self.seconds(operation).values()]

    def cpu_seconds(self, operation: Operation) -> float:
        """Of the processor, all ranks together: the median of all repeats. Others on the machine hardly change it."""
        return statistics.median(value for job in self.timed.values() for value in job.cpu_seconds[operation.work_key])

    def best(self, operation: Operation) -> float:
        """Bytes of state a second, the best of all repeats."""
        nbytes = operation.bytes_per_parameter * self.num_params
        return nbytes / min(value for job in self.timed.values() for value in job.seconds[operation.key])

    def ratios_to_disk(self, operation: Operation, work: Callable[[DiskSpeed], float | None]) -> list[float]:
        """This contender's speed over the disk's own in the same minute, for every round."""
        scale = operation.bytes_per_parameter / STATE_BYTES_PER_PARAMETER  # the disk was given the whole state
        found = [(work(self.disk[number]), value) for number, value in self.seconds(operation).items()]
        return [seconds * scale / value for seconds, value in found if seconds is not None]

    def ratios_to(self, operation: Operation, other: SaveRow | None) -> list[float]:
        """This contender's speed over the other's, for every round that both finished."""
        if other is None:
            return []
        own, theirs = self.seconds(operation), other.seconds(operation)
        return [theirs[number] / own[number] for number in sorted(own.keys() & theirs.keys())]


@dataclass
class SaveComparison:
    """All rows of one run, and how it was made."""

    rows: list[SaveRow]
    settings: dict[str, Any]

    def row(self, name: str) -> SaveRow | None:
        """Gives the row of a contender, None where it was not run."""
        return next((row for row in self.rows if row.contender.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Gives every raw number and what was made of it, for JSON."""
        return {"settings": self.settings, "contenders": [self._row_as_dict(row) for row in self.rows]}

    def _row_as_dict(self, row: SaveRow) -> dict[str, Any]:
        return {
            **row.contender.as_dict(),
            "failure": row.failure,
            "operations": {op.key: self._numbers(row, op) for op in OPERATIONS if row.timed},
            "rounds": {str(number): asdict(job) for number, job in row.timed.items()},
            "disk": {str(number): asdict(disk) for number, disk in row.disk.items()},
            "memory": asdict(row.memory) if row.memory else None,
        }

    def _numbers(self, row: SaveRow, operation: Operation) -> dict[str, Any]:
        return {
            "bytes_per_second": statistics.median(row.speeds(operation)),
            "best_bytes_per_second": row.best(operation),
            "cpu_seconds": row.cpu_seconds(operation),
            "ratios_to_plain": row.ratios_to_disk(operation, operation.plain),
            "ratios_to_direct": row.ratios_to_disk(operation, operation.direct),
            "ratios_to_fsdp2": row.ratios_to(operation, self.row(FSDP2)),
            "ratios_to_deepspeed": row.ratios_to(operation, self.row(DEEPSPEED)),
        }


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} [dim]({min(values):.2f}-{max(values):.2f})[/dim]"


def _megabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f}"


def make_table(comparison: SaveComparison) -> Table:
    """Gives the table: a section an operation, a row a contender; ratios of speeds, so that more is better."""
    table = Table(title=comparison.settings["title"])
    table.add_column("contender")
    for heading in ["MB/s\nmedian", "MB/s\nbest", "x plain\nwrite or read", "x O_DIRECT\nwrite"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ["x FSDP2", "x DeepSpeed"]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CPU s\nall ranks", justify="right")
    table.add_column("extra\nMiB a rank", justify="right")
    for operation in OPERATIONS:
        table.add_section()
        table.add_row(f"[bold]{operation.label}[/bold]")
        for row in comparison.rows:
            table.add_row(*_cells(comparison, row, operation))
    return table


def _cells(comparison: SaveComparison, row: SaveRow, operation: Operation) -> list[str]:
    label = "  " + row.contender.label
    if not row.timed:
        return [label + " [red]FAILED[/red]" * bool(row.failure)]
    extra = row.memory.extra_bytes.get(operation.work_key) if row.memory else None
    return [
        label,
        _megabytes(statistics.median(row.speeds(operation))),
        _megabytes(row.best(operation)),
        _spread(row.ratios_to_disk(operation, operation.plain)),
        _spread(row.ratios_to_disk(operation, operation.direct)),
        _spread(row.ratios_to(operation, comparison.row(FSDP2))),
        _spread(row.ratios_to(operation, comparison.row(DEEPSPEED))),
        f"{row.cpu_seconds(operation):.2f}",
        "-" if extra is None else f"{extra / MIB:.0f}",
    ]


def disk_lines(comparison: SaveComparison) -> list[str]:
    """What the disk itself did, over all rounds."""
    nbytes = comparison.settings["num_params"] * STATE_BYTES_PER_PARAMETER
    named: dict[str, Callable[[DiskSpeed], float | None]] = {
        "plain write and fsync": lambda disk: disk.write,
        "the same with O_DIRECT": lambda disk: disk.write_direct,
        "plain read, cold": lambda disk: disk.read_cold,
        "plain read, from the page cache": lambda disk: disk.read_warm,
    }
    lines = []
    for label, work in named.items():
        seconds = [work(disk) for row in comparison.rows for disk in row.disk.values()]
        speeds = [nbytes / value / 1e6 for value in seconds if value is not None]
        if speeds:
            spread = f"({min(speeds):.0f}-{max(speeds):.0f}, after {len(speeds)} jobs)"
            lines.append(f"{label}: {statistics.median(speeds):.0f} MB/s {spread}")
    return lines


def write_chart(comparison: SaveComparison, path: Path) -> None:
    """Writes a PNG: bars of the speeds, with lowest and highest round, and the disk's own speed as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in comparison.rows if row.timed]
    labels, places = [row.contender.label for row in rows], range(len(rows))
    colours = ["tab:blue" if row.contender.kind == "lowtide" else "tab:gray" for row in rows]
    figure, grid = pyplot.subplots(
        1, len(_IN_CHART), figsize=(3.6 * len(_IN_CHART), 1.6 + 0.42 * len(rows)), sharey=True, layout="constrained"
    )
    for axes, operation in zip(grid, _IN_CHART, strict=True):
        speeds = [[value / 1e9 for value in row.speeds(operation)] for row in rows]
        middle = [statistics.median(values) for values in speeds]
        errors = [[m - min(v) for m, v in zip(middle, speeds, strict=True)]]
        errors.append([max(v) - m for m, v in zip(middle, speeds, strict=True)])
        axes.barh(places, middle, xerr=errors, color=colours, ecolor="black", capsize=2)
        nbytes = STATE_BYTES_PER_PARAMETER * comparison.settings["num_params"]
        plain = [nbytes / operation.plain(disk) / 1e9 for row in rows for disk in row.disk.values()]
        axes.axvline(statistics.median(plain), color="black", linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"{operation.label}, GB/s")
    grid[0].set_yticks(places, labels)
    grid[0].invert_yaxis()
    figure.suptitle(f"{comparison.settings['title']}; dotted: plain write and fsync, plain read (more is better)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
