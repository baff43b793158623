"""`lowtide tune`: run the planner's best configs as short trials of the user's script, and keep the fastest."""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..engine.config.config import Config
from ..engine.config.read import read
from ..engine.plan.machine import fit_factors, gigabytes
from ..engine.plan.measured import Factors, Measured, default_path
from ..engine.trial import TrialRequest
from . import launch
from .arguments import Parser, console_of, numbers, picture, picture_file, reports
from .trials import TrialOutcome, run

_EXAMPLES = """examples:
  lowtide tune zero3 --nproc 2 examples/train_gpt.py
  lowtide tune auto --trials 8 --steps 20 train.py --data /data
  lowtide tune my.json --limit 120 --total 1200 --launch "--hostfile hosts.txt" -m my_package.train
  lowtide tune my.json --nproc 2 train.py             after Ctrl-C, the same command continues

If CONFIG has "auto" values, only these are varied. Otherwise CONFIG is measured first, and then all values that a plan
can choose are varied. The script needs no change: in a trial it saves nothing and ends after a few steps.
Write options of lowtide before SCRIPT.
"""


@reports("tune", ValueError, OSError)
def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if a trial was measured, 1 if not, 128 + N after signal N."""
    options = parser().parse_args(argv)
    if options.trials < 1 or options.steps < 1 or options.warmup < 1:
        parser().error("--trials, --steps, --warmup: expected at least 1 each; the first step allocates the states")
    if options.sequence is not None and options.sequence < 1:
        parser().error(f"--sequence: expected at least 1 token, found {options.sequence}")
    try:
        words = _launched(options)
    except ValueError as error:
        parser().error(f"--launch: {error}, found {options.launch}")
    if text := launch.fault(launch.parser().parse_args(words)):
        parser().error(text)
    name, written = launch.after_script(options, parser())
    if name:
        print(
            f"lowtide tune: {name} was passed to the script, because it comes after the script; if it is for lowtide, "
            f"write it before the script: lowtide tune {options.config} {written} {options.script}",
            file=sys.stderr,
        )
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        # As Ctrl-C: the trial's job is stopped, and the same command continues.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return _Tuning(options).run()
    except KeyboardInterrupt:
        print(f"lowtide tune: interrupted; the same command continues in {options.folder}", file=sys.stderr)
        return 128 + (caught[0] if caught else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Tried:
    """A trial. planned: {"choice", "seconds", "peak_bytes"} of its plan; {} if the config could not be planned."""

    name: str
    planned: Mapping[str, Any]
    outcome: TrialOutcome

    @property
    def step_seconds(self) -> float:
        """Seconds of a step. The trial must have been measured."""
        return float(self.outcome.result["step_seconds"])

    @property
    def samples_per_second(self) -> float:
        """Samples per second. The trial must have been measured."""
        return float(self.outcome.result["samples"]) / self.step_seconds

    @property
    def planned_seconds(self) -> float | None:
        return sum(self.planned["seconds"].values()) if self.planned else None

    @property
    def speed(self) -> float:
        """Sort key of tables: the fastest first, unmeasured trials last."""
        return -self.samples_per_second if self.outcome.state == "measured" else 0.0


class _Tuning:
    """The trials of a folder, new or continued."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.folder if options.folder else Path("tuned") / Path(options.config).stem
        options.folder = self._folder
        self._raw, _ = read(options.config)
        self._config = Config.load(options.config)
        self._deadline: float = time.monotonic() + options.total
        self._words = _launched(options)
        self._best: Path = options.write or self._folder / "best.json"
        self._png: Path = options.png or self._folder / "trials.png"

    def run(self) -> int:
        """Run all trials. Raises ValueError if the folder has trials of another command, or another process uses it."""
        if self._folder.is_file():
            raise ValueError(f"--folder: expected a folder for the trials, found the file {self._folder}")
        self._folder.mkdir(parents=True, exist_ok=True)
        # A lock of the folder itself: no file is left, and it ends with the process.
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems have no locks
                _lock(lock, self._folder)
            self._open()
            return self._run()
        finally:
            os.close(lock)

    def _run(self) -> int:
        # A config with "auto" cannot be trained before it is planned.
        given = None if self._config.planned_keys else self._try("given", self._raw, False)
        plan = self._plan(None if given is None else given.result.get("batch"))
        planned_given = (plan or {}).get("given") or {}
        tried = [] if given is None else [Tried("given", planned_given, given)]
        best = [] if plan is None else [each for each in plan["best"] if each["choice"] != planned_given.get("choice")]
        for number, planned in enumerate(best[: self._options.trials], start=1):
            if time.monotonic() >= self._deadline:
                print(f"the time of all trials ({self._options.total:g} s) is over; --total gives more")
                break
            name = f"trial-{number}"
            tried.append(Tried(name, planned, self._try(name, planned["config"], True)))
        return self._conclude(tried, plan)

    def _open(self) -> None:
        options = self._options
        asked = {"config": self._raw, "launch": self._words, "steps": options.steps, "warmup": options.warmup}
        path = self._folder / "tune.json"
        if path.exists() and options.again:
            for left in (self._folder / "given", self._folder / "plan", *self._folder.glob("trial-*")):
                shutil.rmtree(left, ignore_errors=not left.exists())
        elif path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key, value in asked.items() if known.get(key) != value]
            if changed:
                raise ValueError(
                    f"{self._folder}: expected trials of the same command, found trials with another "
                    f"{', '.join(changed)}; use another --folder, or --again to delete these trials"
                )
        for written in (self._best, self._png):
            written.parent.mkdir(parents=True, exist_ok=True)
            if written.is_dir():
                raise ValueError(f"{written}: expected the name of a file, found a folder")
        path.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")

    def _plan(self, batch: Any) -> Mapping[str, Any] | None:
        """Plan the config with the script's model and batch. Return None if it cannot be planned."""
        options, folder = self._options, self._folder / "plan"
        result = str((folder / "result.json").resolve())
        # A plan more than trials: the given config may be among them, and it is not tried again.
        request = TrialRequest(
            "plan", self._raw, result, num_plans=options.trials + 1, batch=batch, sequence=options.sequence
        )
        outcome = run(request, folder, self._words, self._limit(), "best")
        if outcome.state != "measured":
            print(f"no plan: {outcome.words} ({folder / 'output.txt'})")
            return None
        found = outcome.result
        print(f"planned {found['num_choices']:,} configs in {found['plan_seconds']:.1f} s, for {found['device']}")
        return found

    def _try(self, name: str, config: Mapping[str, Any], is_whole: bool) -> TrialOutcome:
        options, folder = self._options, self._folder / name
        result = str((folder / "result.json").resolve())
        request = TrialRequest("measure", config, result, is_whole, options.warmup, options.steps)
        outcome = run(request, folder, self._words, self._limit(), "step_seconds")
        is_measured = outcome.state == "measured"
        text = f"{outcome.result['step_seconds']:.4g} s a step" if is_measured else f"{outcome.state}: {outcome.words}"
        print(f"{name}: {text}", flush=True)
        return outcome

    def _limit(self) -> float:
        limit: float = self._options.limit
        return max(1.0, min(limit, self._deadline - time.monotonic()))

    def _conclude(self, tried: Sequence[Tried], plan: Mapping[str, Any] | None) -> int:
        console = console_of(132)
        if tried:
            console.print(table(tried))
        measured = [trial for trial in tried if trial.outcome.state == "measured"]
        if not measured:
            print("lowtide tune: no trial was measured; each folder has the trial's output.txt", file=sys.stderr)
            return 1
        if text := ignored_rows(measured):
            print(f"lowtide tune: {text}", file=sys.stderr)
        # By samples, not steps: configs have different batches.
        best = max(measured, key=lambda trial: trial.samples_per_second)
        self._best.write_text(json.dumps(best.outcome.result["config"], indent=2) + "\n", encoding="utf-8")
        print(f"the fastest is {best.name}, {best.samples_per_second:.4g} samples/s: {self._best}")
        try:
            draw(measured, self._png)
            print(f"picture of predicted and measured: {self._png}")
        except (ValueError, OSError) as error:
            print(f"lowtide tune: no picture: {error}", file=sys.stderr)
        if plan is not None and not self._options.no_calibrate:
            self._calibrate(measured, plan)
        return 0

    def _calibrate(self, measured: Sequence[Tried], plan: Mapping[str, Any]) -> None:
        """Write correction factors into the machine's file, for the next plan."""
        steps = [(trial.planned["seconds"], trial.step_seconds) for trial in measured if trial.planned]
        factors = fit_factors(steps)
        if not steps or factors == Factors():
            return
        path, key = default_path(), plan["device"]
        try:
            found = Measured.read(path) if path.exists() else Measured({})
            before = found.factor(key)  # this plan already used them
            product = Factors(before.computing * factors.computing, before.moving * factors.moving)
            replace(found, factors={**found.factors, key: product}).write(path)
        except (ValueError, OSError) as error:
            print(f"lowtide tune: measured factors were not saved for the next plan: {error}", file=sys.stderr)
            return
        print(
            f"computing took {factors.computing:.3g} times as long as planned, moving bytes {factors.moving:.3g} "
            f"times; the next plan on {key} uses these factors: {path}"
        )


def ignored_rows(measured: Sequence[Tried]) -> str:
    """Return a warning if the script ignores the config's rows per microbatch, else ""."""
    for first, second in combinations(measured, 2):
        rows = [trial.planned.get("choice", {}).get("rows") for trial in (first, second)]
        batches = [trial.outcome.result.get("batch") for trial in (first, second)]
        if None not in (*rows, batches[0]) and rows[0] != rows[1] and batches[0] == batches[1]:
            return (
                f"{first.name} has {rows[0]} rows a microbatch, {second.name} {rows[1]}, and the script gave both the "
                "same batch, so samples/s are wrong; make batches of engine.config.train_micro_batch_size_per_gpu "
                'rows, or set the batch sizes in CONFIG and leave "auto" to the remaining keys'
            )
    return ""


def table(tried: Sequence[Tried]) -> Table:
    """Make a table of the trials, the fastest first, with a column for each key in which their configs differ."""
    choices = [trial.planned["choice"] for trial in tried if trial.planned]
    names = [name for name in (choices[0] if choices else ()) if len({str(choice[name]) for choice in choices}) > 1]
    keys = (name.replace("_", " ") for name in names)
    columns = numbers(*keys, "s a step, planned", "measured", "samples/s", "peak GB, planned", "measured")
    result = Table("", *columns, "", title="planned and measured")
    for trial in sorted(tried, key=lambda trial: trial.speed):
        choice, outcome = trial.planned.get("choice", {}), trial.outcome
        is_measured = outcome.state == "measured"
        cells = [str(choice.get(name, "")) for name in names]
        cells += [_number(trial.planned_seconds), _number(trial.step_seconds if is_measured else None)]
        cells += [_number(trial.samples_per_second if is_measured else None)]
        cells += [_gigabytes(trial.planned.get("peak_bytes")), _gigabytes(outcome.result.get("peak_bytes"))]
        result.add_row(trial.name, *cells, "" if is_measured else escape(f"{outcome.state}: {outcome.words}"))
    return result


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _gigabytes(value: float | None) -> str:
    return "" if value is None else gigabytes(value)


def draw(measured: Sequence[Tried], path: Path) -> None:
    """Draw the planned and the measured seconds of a step for each trial."""
    rows = sorted(measured, key=lambda trial: trial.speed)
    with picture(path, 8, 1.5 + 0.5 * len(rows)) as axes:
        places = range(len(rows))
        axes.barh([place - 0.2 for place in places], [row.planned_seconds or 0 for row in rows], 0.38, label="planned")
        axes.barh([place + 0.2 for place in places], [row.step_seconds for row in rows], 0.38, label="measured")
        axes.set_yticks(list(places), [_label(row) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("seconds a step")
        axes.set_title("most samples per second first", loc="left")
        axes.legend()


def _label(trial: Tried) -> str:
    choice = trial.planned.get("choice")
    if not choice:
        return trial.name
    return (
        f"{trial.name}: stage {choice['stage']}, pipeline {choice['pipeline']}, {choice['rows']} x "
        f"{choice['accumulation']} rows, checkpointing {choice['every']}"
    )


def _launched(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `lowtide launch`. Raises ValueError for unbalanced quotes."""
    words = ["--nproc", str(options.nproc)] if options.nproc else []
    script = ["-m", options.script] if options.module else [options.script]
    return [*words, *shlex.split(options.launch), *script, *options.arguments]


def _lock(handle: int, folder: Path) -> None:
    """Lock the folder until the handle is closed.

    Raises ValueError if another process has the lock, OSError if the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{folder}: expected no other process, found another `lowtide tune` in this folder; wait until it ends, or "
            "use another --folder"
        ) from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'expected seconds, more than 0, found "{text}"')
    return value


def parser() -> Parser:
    """Return the command line of `lowtide tune`."""
    result = Parser.of("tune", _EXAMPLES)
    add = result.add_argument
    add("--trials", type=int, default=5, metavar="N", help="planned configs to try, besides CONFIG (default: 5)")
    add("--steps", type=int, default=10, metavar="N", help="timed steps of a trial (default: 10)")
    add("--warmup", type=int, default=3, metavar="N", help="steps before the timed steps (default: 3)")
    add("--limit", type=_seconds, default=600.0, metavar="SECONDS", help="limit of a trial, with start (default: 600)")
    add("--total", type=_seconds, default=3600.0, metavar="SECONDS", help="limit of all trials (default: 3600)")
    add("--sequence", type=int, metavar="N", help="tokens of a sample, if no trial has shown the plan a batch")
    add("--folder", type=Path, metavar="DIR", help="folder of the trials, visible to all hosts (default: tuned/CONFIG)")
    add("--again", action="store_true", help="delete the trials in the folder first")
    add("--write", type=Path, metavar="FILE", help="file for the fastest config (default: best.json in the folder)")
    add(
        "--png",
        type=picture_file,
        metavar="FILE",
        help="picture of planned and measured times (default: trials.png there)",
    )
    add("--no-calibrate", action="store_true", help="do not save measured factors for the next plan")
    add("--nproc", metavar="N|auto", help="ranks on each host, as for `lowtide launch`")
    add("--launch", default="", metavar="OPTIONS", help="more options of `lowtide launch`, in quotes")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    add("config", metavar="CONFIG", help="a JSON file or a preset; its values override those that the script passes")
    add("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script").required = False
    return result
