"""`lowtide tune`: the planner's best few configs as short trials of the user's own script, and the fastest of them."""

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
from pathlib import Path
from types import FrameType
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..engine.config.config import Config, ConfigError
from ..engine.config.read import read
from ..engine.plan.machine import MeasuredStep, fit
from ..engine.plan.measured import Factors, Measured, default_path
from ..engine.trial import TrialRequest
from . import launch
from .arguments import Parser, console_of, picture
from .trials import TrialOutcome, run

_EXAMPLES = """examples:
  lowtide tune zero3 --nproc 2 examples/train_gpt.py
  lowtide tune auto --trials 8 --steps 20 train.py --data /data
  lowtide tune my.json --limit 120 --total 1200 --launch "--hostfile hosts.txt" -m my_package.train
  lowtide tune my.json --nproc 2 train.py             after Ctrl-C the same command goes on where it was

A CONFIG with "auto" leaves these keys open; one without is measured as it is, and then all that a plan chooses is open.
The script is not changed, saves nothing, and ends after a few steps. Options of lowtide stand before SCRIPT.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; 0 if something was measured, 1 if nothing ran, 128 + N after a signal."""
    options = parser().parse_args(argv)
    if options.trials < 1 or options.steps < 1 or options.warmup < 1:
        parser().error("--trials, --steps, --warmup: expected at least 1 of each; the first step makes the states")
    if options.sequence is not None and options.sequence < 1:
        parser().error(f"--sequence: expected at least 1 token, found {options.sequence}")
    try:
        words = _launched(options)
    except ValueError as error:
        parser().error(f"--launch: {error}, found {options.launch}")
    if text := launch.fault(launch.parser().parse_args(words)):
        parser().error(text)
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return _Tuning(options).run()
    except (ConfigError, ValueError, OSError) as error:
        print(f"lowtide tune: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lowtide tune: interrupted; the same command goes on from {options.folder}", file=sys.stderr)
        return 128 + (caught[0] if caught else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Tried:
    """planned: {"choice", "seconds", "peak_bytes"} of the plan; {} of a config that could not be planned."""

    name: str
    planned: Mapping[str, Any]
    outcome: TrialOutcome

    @property
    def step_seconds(self) -> float:
        """Of one that was measured."""
        return float(self.outcome.result["step_seconds"])

    @property
    def samples_per_second(self) -> float:
        """Of one that was measured."""
        return float(self.outcome.result["samples"]) / self.step_seconds

    @property
    def planned_seconds(self) -> float | None:
        return sum(self.planned["seconds"].values()) if self.planned else None

    @property
    def speed(self) -> float:
        """For the order of a table: the fastest first, and what was not measured last."""
        return -self.samples_per_second if self.outcome.state == "measured" else 0.0


@dataclass(frozen=True)
class _Candidate:
    """name: of its folder. planned: as the plan has written it; {} of a config that could not be planned."""

    name: str
    config: Mapping[str, Any]
    is_whole: bool
    planned: Mapping[str, Any]


class _Tuning:
    """One folder of trials, made or gone on with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.folder if options.folder else Path("tuned") / Path(options.config).stem
        options.folder = self._folder
        self._raw, _ = read(options.config)
        self._config = Config.load(self._raw)
        self._deadline: float = time.monotonic() + options.total
        self._words = _launched(options)
        self._best: Path = options.write or self._folder / "best.json"
        self._png: Path = options.png or self._folder / "trials.png"

    def run(self) -> int:
        """Raises ValueError for a folder of other trials, or in which another command is at work."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # of a file system without locks
                _lock(lock, self._folder)
            self._open()
            return self._run()
        finally:
            os.close(lock)

    def _run(self) -> int:
        tried: list[Tried] = []
        batch = None
        given = None
        if not self._config.planned_keys:
            given = self._try(_Candidate("given", self._raw, False, {}))
            batch = given.outcome.result.get("batch")
        plan = self._plan(batch)
        if given is not None:
            planned = (plan or {}).get("given") or {}
            tried.append(Tried(given.name, planned, given.outcome))
        for candidate in self._candidates(plan):
            if time.monotonic() >= self._deadline:
                print(f"the time of all trials ({self._options.total:g} s) is over; --total gives more")
                break
            tried.append(self._try(candidate))
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
            other = [key for key, value in asked.items() if known.get(key) != value]
            if other:
                raise ValueError(
                    f"{self._folder}: expected trials of the same command, found others (another {', '.join(other)}); "
                    "give --folder for new ones beside them, or --again to throw them away"
                )
        for written in (self._best, self._png):
            written.parent.mkdir(parents=True, exist_ok=True)
            if written.is_dir():
                raise ValueError(f"{written}: expected the name of a file, found a folder")
        path.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")

    def _plan(self, batch: Any) -> Mapping[str, Any] | None:
        """What the script's own model and batch make of the config; None where that cannot be planned."""
        options, folder = self._options, self._folder / "plan"
        result = str((folder / "result.json").resolve())
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

    def _candidates(self, plan: Mapping[str, Any] | None) -> list[_Candidate]:
        if plan is None:
            return []
        given = (plan["given"] or {}).get("choice")
        best = [one for one in plan["best"] if one["choice"] != given][: self._options.trials]
        return [_Candidate(f"trial-{number}", one["config"], True, one) for number, one in enumerate(best, 1)]

    def _try(self, candidate: _Candidate) -> Tried:
        options, folder = self._options, self._folder / candidate.name
        result = str((folder / "result.json").resolve())
        request = TrialRequest("measure", candidate.config, result, candidate.is_whole, options.warmup, options.steps)
        outcome = run(request, folder, self._words, self._limit(), "step_seconds")
        print(f"{candidate.name}: {_said(outcome)}", flush=True)
        return Tried(candidate.name, candidate.planned, outcome)

    def _limit(self) -> float:
        limit: float = self._options.limit
        return max(1.0, min(limit, self._deadline - time.monotonic()))

    def _conclude(self, tried: Sequence[Tried], plan: Mapping[str, Any] | None) -> int:
        console = console_of(132)
        if tried:
            console.print(table(tried))
        measured = [one for one in tried if one.outcome.state == "measured"]
        if not measured:
            print("lowtide tune: no trial has run; the output of each is in its folder", file=sys.stderr)
            return 1
        if text := ignored_rows(measured):
            print(f"lowtide tune: {text}", file=sys.stderr)
        best = max(measured, key=lambda one: one.samples_per_second)
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
        """Puts what was measured where the next plan begins."""
        steps = [MeasuredStep(one.planned["seconds"], one.step_seconds) for one in measured if one.planned]
        factors = fit(steps)
        if not steps or factors == Factors():
            return
        path, key = default_path(), plan["device"]
        try:
            found = Measured.read(path) if path.exists() else Measured({})
            before = found.factor(key)  # the plan began from these
            both = Factors(before.computing * factors.computing, before.moving * factors.moving)
            replace(found, factors={**found.factors, key: both}).write(path)
        except (ValueError, OSError) as error:
            print(f"lowtide tune: what was measured is not kept for the next plan: {error}", file=sys.stderr)
            return
        print(
            f"computing took {factors.computing:.3g} times as long as planned, moving bytes {factors.moving:.3g} "
            f"times; the next plan on {key} begins from that: {path}"
        )


def ignored_rows(measured: Sequence[Tried]) -> str:
    """What to say of a script whose microbatches stay as they are where the config has another number of rows."""
    for one in measured:
        for other in measured:
            rows, others = (each.planned.get("choice", {}).get("rows") for each in (one, other))
            batch = one.outcome.result.get("batch")
            if None not in (rows, others, batch) and rows != others and batch == other.outcome.result.get("batch"):
                return (
                    f"{one.name} has {rows} rows a microbatch, {other.name} {others}, and the script gave both the "
                    "same: samples/s are not true. Expected batches by engine.config.train_micro_batch_size_per_gpu; "
                    'or give the batch sizes in CONFIG values, and only other keys "auto"'
                )
    return ""


def table(tried: Sequence[Tried]) -> Table:
    """The fastest first. A column for each key of the choices in which they differ."""
    choices = [one.planned["choice"] for one in tried if one.planned]
    names = [name for name in (choices[0] if choices else ()) if len({str(one[name]) for one in choices}) > 1]
    result = Table(title="predicted beside measured")
    result.add_column("")
    for name in (*names, "s a step, planned", "measured", "samples/s", "peak GB, planned", "measured"):
        result.add_column(name.replace("_", " "), justify="right")
    result.add_column("")
    for one in sorted(tried, key=lambda one: one.speed):
        choice = one.planned.get("choice", {})
        is_measured = one.outcome.state == "measured"
        peak = one.outcome.result.get("peak_bytes")
        cells = [str(choice.get(name, "")) for name in names]
        cells += [_number(one.planned_seconds), _number(one.step_seconds if is_measured else None)]
        cells += [_number(one.samples_per_second if is_measured else None)]
        cells += [_gigabytes(one.planned.get("peak_bytes")), _gigabytes(peak)]
        result.add_row(one.name, *cells, "" if is_measured else escape(f"{one.outcome.state}: {one.outcome.words}"))
    return result


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.3g}"


def draw(measured: Sequence[Tried], path: Path) -> None:
    """Seconds of a step, planned and measured, beside each other."""
    rows = sorted(measured, key=lambda one: one.speed)
    with picture(path, 8, 1.5 + 0.5 * len(rows)) as axes:
        places = range(len(rows))
        axes.barh([place - 0.2 for place in places], [one.planned_seconds or 0 for one in rows], 0.38, label="planned")
        axes.barh([place + 0.2 for place in places], [one.step_seconds for one in rows], 0.38, label="measured")
        axes.set_yticks(list(places), [_label(one) for one in rows])
        axes.invert_yaxis()
        axes.set_xlabel("seconds a step")
        axes.set_title("the fastest by sample first", loc="left")
        axes.legend()


def _label(one: Tried) -> str:
    choice = one.planned.get("choice")
    if not choice:
        return one.name
    return (
        f"{one.name}: stage {choice['stage']}, pipeline {choice['pipeline']}, {choice['rows']} x "
        f"{choice['accumulation']} rows, checkpointing {choice['every']}"
    )


def _launched(options: argparse.Namespace) -> list[str]:
    """The command line of `lowtide launch`. Raises ValueError for quotes that do not end."""
    words = ["--nproc", str(options.nproc)] if options.nproc else []
    script = ["-m", options.script] if options.module else [options.script]
    return [*words, *shlex.split(options.launch), *script, *options.arguments]


def _lock(handle: int, folder: Path) -> None:
    """Until the handle is closed. Raises ValueError where another one has it, OSError where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{folder}: expected no other command, found that another `lowtide tune` is at work in it; wait for its "
            "end, or give another --folder"
        ) from error


def _said(outcome: TrialOutcome) -> str:
    if outcome.state != "measured":
        return f"{outcome.state}: {outcome.words}"
    return f"{outcome.result['step_seconds']:.4g} s a step"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'expected seconds, more than 0, found "{text}"')
    return value


def parser() -> Parser:
    """The command line of `lowtide tune`."""
    result = Parser.of("tune", _EXAMPLES)
    add = result.add_argument
    add("--trials", type=int, default=5, metavar="N", help="of the plan's best, beside CONFIG itself (5)")
    add("--steps", type=int, default=10, metavar="N", help="that are timed in each (10)")
    add("--warmup", type=int, default=3, metavar="N", help="before them, not timed (3)")
    add("--limit", type=_seconds, default=600.0, metavar="SECONDS", help="of a trial, with its start (600)")
    add("--total", type=_seconds, default=3600.0, metavar="SECONDS", help="of all together (3600)")
    add("--sequence", type=int, metavar="N", help="tokens of a sample, where no batch tells a plan")
    add("--folder", type=Path, metavar="DIR", help="of the trials; all hosts must see it (tuned/CONFIG)")
    add("--again", action="store_true", help="throw away the trials that are in the folder")
    add("--write", type=Path, metavar="FILE", help="the fastest config (best.json in the folder)")
    add("--png", type=Path, metavar="FILE", help="picture of predicted and measured (trials.png in the folder)")
    add("--no-calibrate", action="store_true", help="do not keep what was measured for the next plan")
    add("--nproc", metavar="N|auto", help="ranks on each host, as of `lowtide launch`")
    add("--launch", default="", metavar="OPTIONS", help="more options of `lowtide launch`, in quotes")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    add("config", metavar="CONFIG", help="a JSON file or a preset, laid over what the script passes")
    add("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script")
    return result
