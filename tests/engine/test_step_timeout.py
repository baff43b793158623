"""`communication.step_timeout_seconds` without a launcher: the rank itself says once what it does, and goes on."""

import contextlib
import io
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Config
from lowtide.watch.progress import Progress
from lowtide.watch.watchdog import Watchdog
from tests.kit.ranks import RankPool, in_a_new_process
from tests.kit.training import refusal, settings

NOTES = ("lowtide: config: ", "lowtide: CPU optimizer: ", "lowtide: training alone on ")


class Slow(nn.Linear):
    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def train(limit: float | None, steps: list[float], after: float = 0.0) -> tuple[list[str], str, list[float]]:
    """Steps that wait so long. The Python threads of the engine, what was said on stderr, and what each step took."""
    config = settings(communication={"step_timeout_seconds": limit})
    model = nn.Sequential(Slow(4, 4), Slow(4, 4))
    before = set(threading.enumerate())  # a rank of the pool may have some of another engine's
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
            took = []
            for Slow.seconds in steps:
                started = time.monotonic()
                engine.train_step((torch.ones(2, 4),))
                took.append(time.monotonic() - started)
            assert engine.global_step == len(steps)
            threads = sorted(thread.name for thread in set(threading.enumerate()) - before)
        time.sleep(after)
    said = stderr.getvalue().splitlines(keepends=True)
    return threads, "".join(line for line in said if not line.startswith(NOTES)), took


def said_by(ranks: RankPool, limit: float, steps: list[float], after: float = 0.0) -> tuple[str, list[int]]:
    """By a rank of its own, so that nothing else of this process has to do with it; and which steps took longer."""
    _, said, took = ranks(1, train, limit, steps, after, process_group=False)[0]
    return said, [step for step, seconds in enumerate(took) if seconds > limit]


def test_each_step_over_the_limit_is_told_once_with_the_stack_and_training_goes_on(ranks: RankPool) -> None:
    said, late = said_by(ranks, 0.4, [0.0, 1.4, 0.0, 1.0, 0.0])
    sentences = re.findall(r"lowtide: rank 0: .*", said)
    steps = [int(step) for step in re.findall(r"goes on; step (\d)", said)]
    assert {1, 3} <= set(steps) <= set(late) and steps == sorted(set(steps))
    for step in (1, 3):
        assert re.sub(r"for \d s", "for N s", sentences[steps.index(step)]) == (
            "lowtide: rank 0: a step has taken longer than 0.4 s (communication.step_timeout_seconds) and goes on; "
            f"step {step}, forward of 0, microbatch 0 for N s. The stacks of its threads:"
        )
    assert said.count(", in train_step\n") == len(steps) and said.count(", in forward\n") >= 2
    assert said.count("thread MainThread:") == len(steps) and "lowtide watchdog" not in said


def test_what_is_in_time_or_after_the_end_is_not_told(ranks: RankPool) -> None:
    for limit, after in ((5.0, 0.0), (0.5, 1.2)):
        said, late = said_by(ranks, limit, [0.0, 0.0], after)
        assert said == "" or late


def test_without_a_limit_nothing_is_told_and_no_thread_runs(ranks: RankPool) -> None:
    assert ranks(1, train, None, [0.5], process_group=False)[0][:2] == ([], "")
    assert ranks(1, train, 60.0, [], process_group=False)[0][:2] == (["lowtide watchdog"], "")


def train_beside_a_launcher(record: str) -> str:
    """What is said of a step over the limit where a launcher has named that file."""
    os.environ["LOWTIDE_PROGRESS_FILE"] = record
    return train(0.3, [0.8])[1]


def test_a_launcher_that_reads_the_record_says_it_instead(tmp_path: Path) -> None:
    assert in_a_new_process(train_beside_a_launcher, str(tmp_path / "rank0")) == ""
    assert (tmp_path / "rank0").exists()


def test_the_thread_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_PROGRESS_FILE", raising=False)
    progress, watchdog = Progress(), Watchdog()
    progress.turn_on()
    watchdog.start(progress, 60.0)
    assert any(thread.name == "lowtide watchdog" for thread in threading.enumerate())
    started = time.monotonic()
    watchdog.stop()
    assert time.monotonic() - started < 30  # and not 60
    assert not any(thread.name == "lowtide watchdog" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("value", "text"), [(0, "expected more than 0, found 0"), ("60s", 'expected a number, found "60s"')]
)
def test_a_limit_that_is_none_is_refused(value: object, text: str) -> None:
    found = refusal(Config.load, {"communication": {"step_timeout_seconds": value}})
    assert "communication.step_timeout_seconds" in found and text in found
