"""`communication.step_timeout_seconds` without a launcher: the rank itself says once what it does, and goes on."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowtide import Config
from lowtide.engine.config.errors import ConfigError

NOTES = ("lowtide: config: ", "lowtide: CPU optimizer: ", "lowtide: training alone on ")
SCRIPT = """
import threading, time
import torch
from torch import nn
import lowtide

class Slow(nn.Linear):
    seconds = 0.0
    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)

model = nn.Sequential(Slow(4, 4), Slow(4, 4))
config = {"optimizer": {"type": "sgd"}, "steps_per_print": 0, "communication": {"step_timeout_seconds": LIMIT}}
engine = lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean())
batch = (torch.ones(2, 4),)
for seconds in STEPS:
    Slow.seconds = seconds
    engine.train_step(batch)
    print("step", flush=True)
print(*sorted(thread.name for thread in threading.enumerate()), sep="\\n")
engine.close()
time.sleep(AFTER)
"""


def run(limit: str, steps: list[float], after: float = 0.0, **environment: str) -> tuple[int, str]:
    """The number of steps that were done, and what was said on stderr."""
    printed, said = output_of(limit, steps, after, **environment)
    return printed.count("step"), "".join(line for line in said.splitlines(keepends=True) if not line.startswith(NOTES))


def threads_of(limit: str) -> list[str]:
    """The Python threads of an engine."""
    return output_of(limit, [], 0.0)[0].splitlines()


def output_of(limit: str, steps: list[float], after: float, **environment: str) -> tuple[str, str]:
    """What the script has printed, and what was said on stderr."""
    code = SCRIPT.replace("LIMIT", limit).replace("STEPS", repr(steps)).replace("AFTER", str(after))
    done = subprocess.run(
        [sys.executable, "-c", code.replace("null", "None")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_each_step_over_the_limit_is_told_once_with_the_stack_and_training_goes_on() -> None:
    steps, said = run("0.4", [0.0, 1.4, 0.0, 1.0, 0.0])
    assert steps == 5
    sentences = re.findall(r"lowtide: rank 0: .*", said)
    assert [re.sub(r"for \d s", "for N s", sentence) for sentence in sentences] == [
        f"lowtide: rank 0: a step has taken longer than 0.4 s (communication.step_timeout_seconds) and goes on; "
        f"step {step}, forward of 0, microbatch 0 for N s. The stacks of its threads:"
        for step in (1, 3)
    ]
    assert said.count(", in train_step\n") == 2 and said.count(", in forward\n") >= 2
    assert said.count("thread MainThread:") == 2 and "lowtide watchdog" not in said


def test_what_is_in_time_or_after_the_end_is_not_told() -> None:
    assert run("5", [0.0, 0.0]) == (2, "")
    assert run("0.5", [0.0], after=1.2) == (1, "")


def test_without_a_limit_nothing_is_told_and_no_thread_runs() -> None:
    assert run("null", [0.5]) == (1, "")
    assert threads_of("null") == ["MainThread"] and threads_of("60") == ["MainThread", "lowtide watchdog"]


def test_a_launcher_that_reads_the_record_says_it_instead(tmp_path: Path) -> None:
    assert run("0.3", [0.8], LOWTIDE_PROGRESS_FILE=str(tmp_path / "rank0")) == (1, "")
    assert (tmp_path / "rank0").exists()


def test_the_thread_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_PROGRESS_FILE", raising=False)
    from lowtide.watch.progress import Progress
    from lowtide.watch.watchdog import Watchdog

    progress, watchdog = Progress(), Watchdog()
    progress.turn_on()
    watchdog.start(progress, 60.0)
    assert any(thread.name == "lowtide watchdog" for thread in threading.enumerate())
    started = time.monotonic()
    watchdog.stop()
    assert time.monotonic() - started < 0.5
    assert not any(thread.name == "lowtide watchdog" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("value", "text"), [(0, "expected more than 0, found 0"), ("60", 'expected a number, found "60"')]
)
def test_a_limit_that_is_none_is_refused(value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=r"communication\.step_timeout_seconds") as caught:
        Config.load({"communication": {"step_timeout_seconds": value}})
    assert text in str(caught.value)
