"""`lowtide tune`: trials that end in every way, their order, and where they go on."""

import fcntl
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lowtide.bin import trials, tune
from lowtide.bin.trials import TrialOutcome
from lowtide.bin.tune import main
from lowtide.engine.config.config import Config
from lowtide.engine.trial import VARIABLE, TrialRequest

CHOICE = {"pipeline": 1, "rows": 4, "accumulation": 1, "every": 0}

# Takes the place of the launcher: no rank is started, and what a script would do is in the config of the trial.
STUB = """
import json, os, sys, time, signal
request = json.load(open(os.environ["LOWTIDE_TRIAL"]))
with open("started.txt", "a") as file:
    file.write(os.path.basename(os.path.dirname(os.environ["LOWTIDE_TRIAL"])) + "\\n")
plan = json.load(open("plan.json"))
def write(values):
    json.dump(values, open(request["result"], "w"))
if request["task"] == "plan":
    write({**plan, "batch_seen": request["batch"]})
    sys.exit(0)
name = request["config"].get("_name", "given")
act = plan["acts"][name]
if isinstance(act, float):
    config = {key: value for key, value in request["config"].items() if key[0] != "_"}
    result = {"step_seconds": act, "steps": [act], "num_steps": 5, "samples": 8}
    write({**result, "batch": {"list": []}, "config": config})
elif act == "hang":
    print("waiting for a lock", flush=True)
    time.sleep(60)
elif act == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif act == "short":
    write({"step_seconds": None, "num_steps": 1})
elif act == "crash in a step":
    write({"step_seconds": 0.01, "num_steps": 5})
    print("lowtide launch: rank 0 failed")
    sys.exit("│ [rank0]: KeyError: 7\\nlowtide launch: Its output is above.")
elif act == "killed in a step":
    write({"num_steps": 0, "batch": {"list": [5]}})
    os.kill(os.getpid(), signal.SIGKILL)
elif act == "nothing":
    pass
else:
    print("│ " + act)
    sys.exit(3)
"""

DRAW = tune.draw


def planned(name: str, stage: int, seconds: float, **config: Any) -> dict[str, Any]:
    return {
        "config": {"_name": name, "zero_optimization": {"stage": stage}, **config},
        "choice": {**CHOICE, "stage": stage},
        "peak_bytes": 10**9,
        "seconds": {"compute": seconds, "gather exposed": seconds / 10 * stage},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script that nobody runs."""
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "c.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(trials, "_LAUNCH", (sys.executable, "-S", str(tmp_path / "stub.py")))
    monkeypatch.setenv("LOWTIDE_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(tune, "draw", lambda measured, path: None)  # which takes a second
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(folder: Path, given: Any, **acts: Any) -> None:
    """What the planner finds, and what becomes of each trial."""
    best = [planned(name, stage, 0.1 * (stage + 1)) for stage, name in enumerate(acts)]
    machine = {"num_hosts": 1, "devices_per_host": 2, "device": "cpu"}
    values = {"device": "cpu, 2 ranks a host", "plan_seconds": 0.1, "machine": machine, "num_choices": 88}
    values |= {"given": planned("given", 9, 0.9), "best": best, "acts": {"given": given, **acts}}
    (folder / "plan.json").write_text(json.dumps(values))


def started(folder: Path) -> list[str]:
    return (folder / "started.txt").read_text().split()


def test_the_fastest_is_written_as_a_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "draw", DRAW)
    plan(folder, 0.4, a=0.2, b=0.1, c=0.3)
    assert main(["c.json", "--trials", "2", "train.py"]) == 0
    said = capsys.readouterr().out
    assert started(folder) == ["given", "plan", "trial-1", "trial-2"]
    assert "planned 88 configs in 0.1 s, for cpu, 2 ranks a host" in said
    assert "the fastest is trial-2, 80 samples/s: tuned/c/best.json" in said
    best = json.loads((folder / "tuned" / "c" / "best.json").read_text())
    assert best == {"zero_optimization": {"stage": 1}} and Config.load(best)
    assert (folder / "tuned" / "c" / "trials.png").stat().st_size > 1000
    rows = [line for line in said.splitlines() if re.search(r"│ (trial|given)", line)]
    assert [row.split()[1] for row in rows] == ["trial-2", "trial-1", "given"]


def test_what_was_measured_is_where_the_next_plan_begins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, 9.0, a=1.0, b=2.1)
    assert main(["c.json", "train.py"]) == 0
    assert "uses these factors: " in capsys.readouterr().out
    factors = json.loads((folder / "machine.json").read_text())["factors"]["cpu, 2 ranks a host"]
    assert factors["computing"] == pytest.approx(10, rel=0.2)
    (folder / "machine.json").unlink()
    assert main(["c.json", "--again", "--no-calibrate", "train.py"]) == 0
    assert not (folder / "machine.json").exists()


def test_every_end_of_a_trial_is_a_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    wrong_rows = "ValueError: batch: expected 8 rows on this rank, found 4"
    acts = {  # what a trial does, and what is said of it
        no_memory: f"out of memory: {no_memory}",
        "hang": "time limit: not done after 2 s; waiting for a lock",
        "killed": "out of memory: killed by SIGKILL, as the kernel does if memory runs out",
        wrong_rows: f"failed: exit status 3: {wrong_rows}",
        "nothing": "failed: the script ended without a call of lowtide.initialize with an optimizer",
        "short": "failed: expected at least 4 steps, found 1; the first 3 are not timed: train for longer, or",
        "crash in a step": "failed: exit status 1: KeyError: 7",
    }
    plan(folder, "MemoryError", **{f"act {number}": act for number, act in enumerate([*acts, 0.5])})
    assert main(["c.json", "--trials", "9", "--limit", "1.5", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "given: out of memory: MemoryError" in said and "the fastest is trial-8" in said
    for number, line in enumerate(acts.values(), 1):
        assert f"trial-{number}: {line}" in said, line


def test_the_same_command_goes_on_where_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, 0.4, a=0.2, b=0.1)
    assert main(["c.json", "--total", "0.01", "train.py"]) == 0
    assert "the time of all trials (0.01 s) is over; --total gives more" in capsys.readouterr().out
    first = started(folder)
    assert main(["c.json", "train.py"]) == 0
    assert first == ["given", "plan"] and started(folder) == ["given", "plan", "trial-1", "trial-2"]
    assert "the fastest is trial-2" in capsys.readouterr().out
    assert main(["c.json", "--steps", "3", "train.py"]) == 1
    said = capsys.readouterr().err
    assert "tuned/c: expected trials of the same command, found trials with another steps; use another --folder" in said
    assert main(["c.json", "--again", "train.py"]) == 0
    assert len(started(folder)) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_trial_is_made_again(number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, 0.4, a="hang")
    output = folder / "tuned" / "c" / "trial-1" / "output.txt"

    is_over = threading.Event()

    def interrupt() -> None:
        while not (output.exists() and output.stat().st_size):
            if is_over.wait(0.02):  # the command has failed: what would be interrupted is pytest
                return
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert main(["c.json", "train.py"]) == 128 + number
    finally:
        is_over.set()
        thread.join()
    assert capsys.readouterr().err == "lowtide tune: interrupted; the same command continues in tuned/c\n"
    plan(folder, 0.4, a=0.2)
    assert main(["c.json", "train.py"]) == 0
    assert started(folder) == ["given", "plan", "trial-1", "trial-1"]


def test_an_interruption_waits_until_the_trial_can_be_stopped(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    started_now: list[Any] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started_now.append(self)
            if "trial-1" in kwargs["stdout"].name:
                os.kill(os.getpid(), signal.SIGINT)

    plan(folder, 0.4, a="hang")
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert main(["c.json", "train.py"]) == 128 + signal.SIGINT
    assert started_now[-1].poll() is not None


def test_nothing_that_runs_is_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, "RuntimeError: no", a="RuntimeError: no")
    assert main(["c.json", "train.py"]) == 1
    assert "no trial was measured; each folder has the trial" in capsys.readouterr().err


def test_a_config_with_auto_is_planned_first(folder: Path) -> None:
    (folder / "c.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}')
    plan(folder, 0.4, a=0.2)
    assert main(["c.json", "--nproc", "2", "train.py", "--lr", "1"]) == 0
    assert started(folder) == ["plan", "trial-1"]
    asked = json.loads((folder / "tuned" / "c" / "tune.json").read_text())
    assert asked["launch"] == ["--nproc", "2", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.json", "train.py"], "no such file: nothing.json"),
        (["--steps", "0", "c.json", "train.py"], "--trials, --steps, --warmup: expected at least 1 each"),
        (["c.json", "trian.py"], 'there is no script "trian.py" in '),
        (["--launch", "'", "c.json", "train.py"], "--launch: No closing quotation, found '"),
        (["--sequence", "0", "c.json", "train.py"], "--sequence: expected at least 1 token, found 0"),
        (["--write", ".", "c.json", "train.py"], ".: expected the name of a file, found a folder"),
        (["--folder", "train.py", "c.json", "train.py"], "--folder: expected a folder for the trials, found the file"),
        (["--folder", "train.py", "c.json", "train.py", "--nproc", "2"], "lowtide tune c.json --nproc 2 train.py"),
        (["typo.json", "train.py"], '1 fault in typo.json:\n  sede: unknown key "sede"; did you mean "seed"?'),
        (["--limit", "x", "c.json", "train.py"], 'expected seconds, more than 0, found "x"'),
    ],
)
def test_what_cannot_be_tuned(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("typo.json").write_text('{"sede": 1}')
    try:
        assert main(words) == 1
    except SystemExit as end:
        assert end.code == 2
    assert said in capsys.readouterr().err


def test_what_may_end_otherwise_now_is_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that was mended, a longer limit, more trials; what was measured stays."""
    plan(folder, "KeyError", a=0.2, b="hang")
    assert main(["c.json", "--trials", "1", "train.py"]) == 0
    plan(folder, 0.4, a=0.2, b="hang")
    assert main(["c.json", "--trials", "2", "--limit", "1", "train.py"]) == 0
    plan(folder, 0.4, a=0.2, b=0.1)
    assert main(["c.json", "--trials", "2", "--limit", "1", "train.py"]) == 0
    assert main(["c.json", "--trials", "2", "train.py"]) == 0
    assert started(folder) == ["given", "plan", "trial-1", "given", "plan", "trial-2", "trial-2"]
    assert "the fastest is trial-2" in capsys.readouterr().out


def test_a_config_that_needs_too_much_memory_is_still_planned_with_its_batch(folder: Path) -> None:
    plan(folder, "killed in a step", a=0.2)
    assert main(["c.json", "train.py"]) == 0
    request = json.loads((folder / "tuned" / "c" / "plan" / "request.json").read_text())
    assert request["batch"] == {"list": [5]}


def test_a_script_that_does_not_take_its_rows_from_the_config_is_told(folder: Path, capsys: Any) -> None:
    plan(folder, 0.4, a=0.2)
    values = json.loads((folder / "plan.json").read_text())
    values["best"][0]["choice"]["rows"] = 2
    (folder / "plan.json").write_text(json.dumps(values))
    assert main(["c.json", "train.py"]) == 0
    assert "given has 4 rows a microbatch, trial-1 2, and the script gave both the same" in capsys.readouterr().err


def test_a_trial_of_another_plan_is_not_taken_for_one_of_this(folder: Path) -> None:
    plan(folder, 0.4, a=0.2, b=0.1)
    assert main(["c.json", "--trials", "1", "train.py"]) == 0
    plan(folder, 0.4, b=0.1, a=0.2)
    assert main(["c.json", "--trials", "2", "train.py"]) == 0
    assert started(folder) == ["given", "plan", "trial-1", "plan", "trial-1", "trial-2"]


def test_again_throws_away_trials_and_nothing_else(folder: Path) -> None:
    (folder / "given").mkdir()
    plan(folder, 0.4, a=0.2)
    assert main(["c.json", "--folder", ".", "--again", "train.py"]) == 0
    assert main(["c.json", "--folder", ".", "--again", "train.py"]) == 0
    assert len(started(folder)) == 6 and (folder / "stub.py").exists()


def test_two_commands_do_not_work_in_one_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, 0.4, a=0.2)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main(["c.json", "--folder", ".", "train.py"]) == 1
    assert ".: expected no other process, found another `lowtide tune` in this folder" in capsys.readouterr().err
    os.close(handle)
    assert main(["c.json", "--folder", ".", "train.py"]) == 0


def test_what_cannot_be_drawn_or_kept_does_not_end_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(folder, 9.0, a="ValueError: [rank0] [/no] markup")
    monkeypatch.setenv("LOWTIDE_MACHINE", str(folder / "c.json" / "machine.json"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(tune, "draw", DRAW)
    assert main(["c.json", "--write", "new/best.json", "train.py"]) == 0
    said = capsys.readouterr()
    assert (folder / "new" / "best.json").exists() and "ValueError: [rank0] [/no] markup" in said.out
    assert 'no picture: tuned/c/trials.png: a picture needs matplotlib: pip install "lowtide[examples]"' in said.err
    assert "measured factors were not saved for the next plan: " in said.err


SCRIPT = """
import gc
import lowtide
from tests.kit import models

if __name__ == "__main__":
    gc.freeze()  # an end that need not go through all of torch is a second shorter
optimizer = {"type": "adamw"}
with lowtide.initialize(models.tiny_gpt(), {"train_batch_size": 4, "optimizer": optimizer}) as engine:
    for number in range(1000):
        engine.train_step(models.token_batch(number, 4))
"""


def planned_here(request: TrialRequest, folder: Path, words: Sequence[str], limit: float, key: str) -> TrialOutcome:
    """As a trial, but the script makes its plan in this process, which has torch; all others are of the launcher."""
    if request.task != "plan":
        return trials.run(request, folder, words, limit, key)
    folder.mkdir(parents=True)
    request.write(folder / "request.json")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setenv(VARIABLE, str(folder / "request.json"))
        runpy.run_path(words[-1])
    return TrialOutcome("measured", 0.0, result=json.loads(Path(request.result).read_text()))


def test_a_script_is_tuned_through_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "run", planned_here)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "c.json").write_text('{"zero_optimization": {"stage": "auto"}}')
    monkeypatch.setenv("LOWTIDE_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(tune, "draw", lambda measured, path: None)
    monkeypatch.chdir(tmp_path)
    words = ["c.json", "--nproc", "1", "--trials", "1", "--steps", "2", "--sequence", "7", "train.py"]
    assert main(words) == 0, capsys.readouterr()
    best = json.loads((tmp_path / "tuned" / "c" / "best.json").read_text())
    assert best["train_batch_size"] == 4 and Config.load(best).resolve(1)
    result = json.loads((tmp_path / "tuned" / "c" / "trial-1" / "outcome.json").read_text())["result"]
    assert result["num_steps"] == 5 and result["peak_bytes"] > 0
