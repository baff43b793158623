"""When a checkpoint is made and under which name; in the background its moment is saved, and nothing is lost."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder, WritingProcess
from lowtide.comm import CollectiveError
from lowtide.engine.archive import save_job
from lowtide.engine.archive.save_job import SaveJob
from lowtide.offload import SequentialFile
from tests.engine.saving import GLOBAL_ROWS, engine_for, load_and_go_on, no_space, run_steps, saved_tensors
from tests.engine.scripts import run_on_two_ranks
from tests.kit.models import mlp, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, differences, refusal

ASYNC = {"checkpoint": {"async": True}}
GPT = Case(short_gpt, token_batch, 3, config=ASYNC)
SLOW_SECONDS = 0.4


MLP = Case(mlp, vector_batch, config=ASYNC)


class SlowDisk:
    """The first write of each file waits until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.started = threading.Event()
        self._real = SequentialFile.write

    def __enter__(self) -> "SlowDisk":
        def write(file: SequentialFile, data: Any) -> int:
            self.started.set()
            assert self.go_on.wait(30)
            return self._real(file, data)

        SequentialFile.write = write  # type: ignore[method-assign, assignment]  # put back at the end
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        SequentialFile.write = self._real  # type: ignore[method-assign]

    def let_go_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.go_on.set).start()


@on_ranks(2)
def test_steps_go_on_while_the_moment_of_the_save_is_written(tmp_path: Path) -> None:
    """One step is saved twice, at once and in the background, and two are trained before the disk does anything."""
    with engine_for(GPT.at(3, config={"checkpoint": {}}), 2) as plain:
        run_steps(plain, GPT, 0, 2)
        plain.save_checkpoint(tmp_path, "expected")
        losses = run_steps(plain, GPT, 2, 2).losses
    engine = engine_for(GPT, 2)
    run_steps(engine, GPT, 0, 2)
    with SlowDisk() as disk:
        engine.save_checkpoint(tmp_path, "a")
        assert disk.started.wait(30)
        assert run_steps(engine, GPT, 2, 2).losses == losses
        assert not (tmp_path / "a").exists() and CheckpointFolder(tmp_path).latest() == "expected"
        disk.go_on.set()
        engine.close()
    assert CheckpointFolder(tmp_path).latest() == "a"  # close has waited
    assert differences(saved_tensors(tmp_path, "a"), saved_tensors(tmp_path, "expected")) == []


def test_a_second_save_and_a_load_wait_for_what_is_being_saved(tmp_path: Path) -> None:
    """The first save is before the first step: it has no states, though training goes on."""
    with engine_for(MLP, 1) as engine:
        with SlowDisk() as disk:
            engine.save_checkpoint(tmp_path, "a")
            expected = run_steps(engine, MLP, 0, 2).losses
            start = time.monotonic()
            disk.let_go_in(SLOW_SECONDS)
            engine.save_checkpoint(tmp_path, "b")
            assert time.monotonic() - start > 0.9 * SLOW_SECONDS
            assert "a" in CheckpointFolder(tmp_path).tags()  # and "b" too, where that was quick
        later = run_steps(engine, MLP, 2, 2).losses
        assert not [name for name in saved_tensors(tmp_path, "a") if name.startswith("state.")]
        assert b"optim.state." not in (tmp_path / "a" / ".metadata").read_bytes()
        engine.load_checkpoint(tmp_path, "a")
        assert run_steps(engine, MLP, 0, 2).losses == expected
        with SlowDisk() as disk:
            engine.save_checkpoint(tmp_path, "c")
            disk.let_go_in(0.2)
            engine.load_checkpoint(tmp_path, "c")
        assert run_steps(engine, MLP, 2, 2).losses == later
    assert CheckpointFolder(tmp_path).tags() == ["a", "b", "c"]


@on_ranks(2)
def test_a_failure_in_the_background_is_raised_on_every_rank(tmp_path: Path) -> None:
    """Rank 1 has no room; the error comes on both ranks at the next step, save, load or close."""
    engine = engine_for(GPT, 2)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: run_steps(engine, GPT, 1, 1),
        "save": lambda: engine.save_checkpoint(tmp_path, "next"),
        "load": lambda: engine.load_checkpoint(tmp_path),
        "close": engine.close,
    }
    run_steps(engine, GPT, 0, 1)
    for where, call in calls.items():
        engine.save_checkpoint(tmp_path, f"before {where}")
        engine.load_checkpoint(tmp_path, f"before {where}")  # waits for it
        with mock.patch.object(os, "pwrite", no_space) if engine.rank == 1 else nullcontext():
            engine.save_checkpoint(tmp_path, "bad")
            deadline = time.monotonic() + 30
            while engine.rank == 1 and not engine._archive.checkpoints.has_failed and time.monotonic() < deadline:
                time.sleep(0.01)
        step = engine.global_step
        assert refusal(call, kind=CheckpointError) == (
            f"saving checkpoint 'bad' to {tmp_path} failed on rank 1: No space left on device. "
            "What was saved before is as it was, and training can go on."
        )
        if where != "close":
            assert engine.global_step == step + (where == "step")
            run_steps(engine, GPT, 2, 1)
    target = CheckpointFolder(tmp_path)
    assert target.tags() == [f"before {where}" for where in calls]
    assert engine.rank == 1 or target.unfinished() == []  # rank 0 clears up, and rank 1 does not wait for that


SCRIPT = """
import signal
from lowtide.engine.archive import checkpoint
from lowtide.offload import SequentialFile
from tests.kit.models import mlp, vector_batch

real = SequentialFile.write
def slow(file, data):
    if not slow.done:
        slow.done = True
        time.sleep(0.5)
    return real(file, data)
slow.done = False

def never_written(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "adamw"}, "checkpoint": {"async": True}}
engine = lowtide.initialize(mlp(), config)
engine.train_step(vector_batch(0, 4))
"""
EXITS = """
SequentialFile.write = slow
engine.save_checkpoint("checkpoints")
if engine.rank == 0:
    sys.exit(0)  # the other falls off its end
"""
DIES = """
if engine.rank == 1:
    checkpoint.write_part = never_written
engine.save_checkpoint("checkpoints")
try:
    engine.close()
except RuntimeError as error:
    print(type(error).__name__, error, file=sys.stderr)
"""


def test_a_script_that_ends_right_after_a_save_completes_it(tmp_path: Path) -> None:
    ends = run_on_two_ranks(SCRIPT + EXITS, tmp_path)
    assert [end.status for end in ends] == [0, 0], ends
    target = CheckpointFolder(tmp_path / "checkpoints")
    assert target.latest() == "global_step1" and target.unfinished() == []
    target.open().verify()


def test_without_a_launcher_a_rank_whose_peer_has_died_leaves_at_once(tmp_path: Path) -> None:
    left, died = run_on_two_ranks(SCRIPT + DIES, tmp_path)
    assert died.status == -signal.SIGKILL
    assert left.seconds - died.seconds < 50, left.err  # for one that is alive elsewhere it would be 60
    words = "CollectiveError saving checkpoint 'global_step1' to checkpoints: rank 0 in an exchange of objects"
    assert words in left.err
    assert "could not be completed: ranks [1] died before their parts were written" in left.err
    assert CheckpointFolder(tmp_path / "checkpoints").latest() is None


@pytest.mark.parametrize("error", [CollectiveError("rank 1 died"), KeyError("mine")])
def test_a_part_from_elsewhere_is_given_up_after_the_script_soon_where_ranks_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    were_lost = isinstance(error, CollectiveError)
    monkeypatch.setattr(save_job, "_SECONDS_AFTER_EXIT", 3600.0 if were_lost else 0.6)
    monkeypatch.setattr(save_job, "_SECONDS_AFTER_LOST_RANKS", 0.0 if were_lost else 3600.0)
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    start = time.monotonic()
    processes = [WritingProcess.this(), WritingProcess(host="another host", pid=1, started=0.0)]
    job = SaveJob(tmp_path, processes, (tmp_path / "rank0.json").touch, lambda: None)  # this rank has written its part
    job.wait_committed()
    assert str(job.commit_error) == "the parts of ranks [1] never came"
    assert were_lost or time.monotonic() - start > 0.6


def test_an_error_in_the_with_block_waits_for_the_part_of_this_rank(tmp_path: Path) -> None:
    with SlowDisk() as disk, pytest.raises(KeyError, match="mine"), engine_for(MLP, 1) as engine:
        engine.save_checkpoint(tmp_path, "a")
        disk.let_go_in(0.2)
        raise KeyError("mine")
    deadline = time.monotonic() + 60
    while CheckpointFolder(tmp_path).latest() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    CheckpointFolder(tmp_path).open().verify()


CASE = Case(mlp, vector_batch)


def case_with(folder: Path | str, **settings: Any) -> Case:
    return CASE.at(0, config={"checkpoint": {"folder": str(folder), **settings}})


def train_and_close(case: Case, steps: int) -> list[float]:
    with engine_for(case, 2) as engine:
        return run_steps(engine, case, 0, steps).losses


def test_every_so_many_steps_one_is_saved_that_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    case = case_with(tmp_path, every_steps=2, **{"async": True})
    losses = ranks(2, train_and_close, case, 7)[0]
    target = CheckpointFolder(tmp_path)
    assert target.tags() == ["global_step2", "global_step4", "global_step6"] and target.latest() == "global_step6"
    assert [target.open(tag).manifest.step for tag in target.tags()] == [2, 4, 6]
    assert not any(target.open(tag).manifest.has_own_tag for tag in target.tags())
    found = ranks(2, load_and_go_on, CASE, tmp_path, 2, "global_step4", 4, 3)[0]
    assert found.losses == losses[4:]


def test_only_the_newest_without_a_tag_of_the_callers_are_kept(tmp_path: Path) -> None:
    case = case_with(tmp_path, every_steps=1, keep_last=2)
    with engine_for(case, 1) as engine:
        for step in range(3):
            run_steps(engine, case, step, 1)
            engine.save_checkpoint(tmp_path, f"own{step}")
            engine.save_checkpoint(tmp_path / "other")
    assert set(CheckpointFolder(tmp_path).tags()) == {"global_step2", "global_step3", *(f"own{i}" for i in range(3))}
    assert CheckpointFolder(tmp_path / "other").tags() == ["global_step2", "global_step3"]


def test_a_training_that_goes_back_replaces_what_it_does_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be relative and new
    case = case_with("runs/a", every_steps=1)
    with engine_for(case, 1) as engine:
        run_steps(engine, case, 0, 3)
        engine.load_checkpoint("runs/a", "global_step1")
        run_steps(engine, case, 7, 1)
        target = CheckpointFolder(tmp_path / "runs" / "a")
        assert target.latest() == "global_step2" and target.tags() == ["global_step1", "global_step3", "global_step2"]


@on_ranks(2)
def test_ranks_that_give_different_tags_use_that_of_rank_0(tmp_path: Path) -> None:
    with engine_for(CASE, 2) as engine:
        for first, second, tag in (("zero", "one", "zero"), (None, "mine", "global_step0"), ("own", None, "own")):
            assert engine.save_checkpoint(tmp_path, second if engine.rank else first) == tag
        assert engine.load_checkpoint(tmp_path, ["zero", "nowhere"][engine.rank]) == {}
    target = CheckpointFolder(tmp_path)
    assert target.tags() == ["zero", "global_step0", "own"]
    assert [target.open(tag).manifest.has_own_tag for tag in target.tags()] == [True, False, True]


def test_saving_between_microbatches_is_refused_and_loading_forgets_their_gradients(tmp_path: Path) -> None:
    case = Case(short_gpt, token_batch, accumulation=3)
    with engine_for(case, 1) as engine:
        run_steps(engine, case, 0, 1)
        engine.save_checkpoint(tmp_path)
        expected = run_steps(engine, case, 1, 2)
        for number in (1, 2):
            engine.backward(engine(*case.batch(9, GLOBAL_ROWS)))
            engine.step()
            assert refusal(engine.save_checkpoint, tmp_path) == (
                f"save_checkpoint: expected a call between steps, found {number} of 3 microbatches done "
                "(gradient_accumulation_steps); gradients are not saved, so call it after engine.step() has updated"
            )
            assert engine.save_checkpoint(tmp_path, "within", within_step=True) == "within"
        engine.load_checkpoint(tmp_path, "global_step1")
        assert run_steps(engine, case, 1, 2).losses == expected.losses
        assert engine.save_checkpoint(tmp_path) == "global_step3"
