"""Steps and notes of the config are seen without any set-up of logging, once every `steps_per_print`."""

import logging
import os
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.comm import World
from lowtide.engine.build import alone_note
from lowtide.engine.report.step_log import StepLog
from lowtide.engine.step.features import StepResult
from lowtide.watch.log import configure, logger
from tests.kit.ranks import RankPool, environment


def train_without_a_launcher() -> None:
    for name in environment(0, 1, 0):
        del os.environ[name]
    sys.argv = ["-c"]
    config = {"optimizer": {"type": "sgd"}, "steps_per_print": 2, "zero_optimization": {"overlap_comm": True}}
    engine = lowtide.initialize(torch.nn.Linear(4, 4), config, loss_fn=lambda output, batch: output.sum())
    lowtide.initialize(torch.nn.Linear(4, 4), config)
    for _ in range(5):
        engine.train_step(torch.ones(2, 4))
    engine.close()


def test_steps_per_print_prints_steps_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(RankPool()) as pool:  # of a process in which nothing has been logged yet
        pool(1, train_without_a_launcher, process_group=False)
    lines = [line.removeprefix("[rank 0] ") for line in capsys.readouterr().out.splitlines()]
    steps = [line.partition(" loss")[0] for line in lines if ": step " in line]
    assert steps == ["lowtide: step 2:", "lowtide: step 4:"]
    assert any("zero_optimization.overlap_comm" in line for line in lines)
    assert [line for line in lines if "alone" in line] == [  # once, for two engines
        "lowtide: training alone on cpu: no launcher has started this process; `lowtide launch --nproc N SCRIPT` "
        "starts N ranks"
    ]


def test_a_line_leaves_out_a_loss_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    result = StepResult(None, torch.ones(()), 0.1, 1.0, False)
    with caplog.at_level(logging.INFO, "lowtide"):
        StepLog(1, 4).after_step(3, result)
    assert "step 3: gradient norm 1.000, learning rate 0.1, " in caplog.text


def test_who_trains_alone_beside_idle_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py"])
    alone = World(0, 1, torch.device("cuda", 0), "nccl", True, 60.0, began_alone=True)
    assert alone_note(alone) == [
        "training alone on cuda:0, one of 8 devices: no launcher has started this process; `lowtide launch train.py` "
        "starts a rank on each device"
    ]
    assert alone_note(replace(alone, began_alone=False)) == []


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_program_that_sets_up_logging_sees_every_line_once(
    is_first: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [configure, lambda: logging.basicConfig(level=logging.INFO, format="own: %(message)s")]
    root = logging.getLogger()
    for one, level in ((root, root.level), (logger, logging.NOTSET)):  # as in a new process, in what follows
        monkeypatch.setattr(one, "handlers", [])
        monkeypatch.setattr(one, "level", level)
    logger.setLevel(logging.NOTSET)  # forgets what was found out about levels
    for step in reversed(steps) if is_first else steps:
        step()
    logger.info("step 1")
    assert capsys.readouterr().err == "own: step 1\n"
