"""SIGTERM or Ctrl-C with `checkpoint.on_sigterm`: the step is finished, saved, and the job leaves."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.engine.step.preemption import Preemption
from tests.engine.saving import STEPS_AFTER, engine_for, load_and_go_on, run_steps
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case

CASE = Case(mlp, vector_batch)


def assert_goes_on(folder: Path) -> None:
    """The checkpoint has all of the steps that were taken: what follows is what would have followed."""
    target = CheckpointFolder(folder)
    target.open().verify()
    step = target.open().manifest.step
    assert 3 <= step < 2000 and target.tags() == [f"global_step{step}"] and target.unfinished() == []
    whole = engine_for(CASE, 1)
    expected = run_steps(whole, CASE, 0, step + STEPS_AFTER).losses
    whole.close()
    assert load_and_go_on(CASE, folder, 1, f"global_step{step}", step).losses == pytest.approx(
        expected[step:], rel=1e-3
    )


def interrupted(folder: Path) -> object:
    """What a rank leaves with where rank 1 has Ctrl-C after three steps."""
    case = CASE.at(0, config={"checkpoint": {"folder": str(folder), "on_sigterm": True}})
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    engine = engine_for(case, 2)
    run_steps(engine, case, 0, 3)
    if engine.rank == 1:
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        run_steps(engine, case, 3, 10)
    for number, handler in before.items():
        signal.signal(number, handler)  # a rank of the pool does not leave
    return caught.value.code


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(
    ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ranks(2, interrupted, tmp_path / "run") == [130, 130]
    said = "".join(capfd.readouterr())
    assert "SIGINT: step 4 is saved in" in said and "run, leaving" in said
    assert_goes_on(tmp_path / "run")


# What a module holds goes when Python has given its handlers up.
LATE = """
import os, signal, sys
from lowtide.engine.step.preemption import Preemption

class Sends:
    def __del__(self, kill=os.kill, process=os.getpid(), write=os.write):
        kill(process, 15)
        write(1, b"left")

preemption = Preemption()
preemption.arm()
if "noted" in sys.argv:
    signal.raise_signal(15)
preemption.leave()
preemption.disarm()
sends = Sends()
if "at once" in sys.argv:
    del sends
"""


def preempted_case(folder: Path) -> Case:
    return CASE.at(0, config={"checkpoint": {"folder": str(folder), "on_sigterm": True, "every_steps": 3}})


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """The signals that reach the handler which was there before the engine."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_the_step_is_finished_saved_once_and_the_engine_closed(tmp_path: Path, handler: list[int]) -> None:
    case = preempted_case(tmp_path)
    engine = engine_for(case, 1)
    run_steps(engine, case, 0, 2)
    signal.raise_signal(signal.SIGTERM)
    assert CheckpointFolder(tmp_path).latest() is None  # nothing happens within a step
    with pytest.raises(SystemExit) as caught:
        run_steps(engine, case, 2, 5)
    assert caught.value.code == 0 and engine.global_step == 3
    assert CheckpointFolder(tmp_path).tags() == ["global_step3"]
    assert handler == []
    signal.raise_signal(signal.SIGTERM)
    assert handler == [signal.SIGTERM]  # whoever had the signal before has it again


def test_a_second_signal_goes_to_whoever_had_it_before(tmp_path: Path, handler: list[int]) -> None:
    engine = engine_for(preempted_case(tmp_path), 1)
    signal.raise_signal(signal.SIGTERM)
    assert handler == []
    signal.raise_signal(signal.SIGTERM)
    assert handler == [signal.SIGTERM]
    engine.close()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_that_is_ctrl_c_interrupts_at_once(tmp_path: Path, first: signal.Signals) -> None:
    with engine_for(preempted_case(tmp_path), 1):
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert CheckpointFolder(tmp_path).latest() is None


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with engine_for(preempted_case(tmp_path), 1):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_signal_is_given_back_when_the_engine_is_closed(tmp_path: Path, handler: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine = engine_for(preempted_case(tmp_path), 1)
    assert signal.getsignal(signal.SIGTERM) is not before
    engine.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_the_setting_the_signal_is_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with engine_for(CASE, 1):
        assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_cannot_receive_signals() -> None:
    texts: list[str] = []

    def arm() -> None:
        with pytest.raises(ValueError) as caught:
            Preemption().arm()
        texts.append(str(caught.value))

    thread = threading.Thread(target=arm, name="trainer")
    thread.start()
    thread.join()
    assert texts == [
        "checkpoint.on_sigterm: expected lowtide.initialize in the main thread, which alone gets signals, found "
        "'trainer'"
    ]


def test_a_process_without_other_handlers_is_ended_by_the_second_signal() -> None:
    code = (
        "import signal, sys\nfrom lowtide.engine.step.preemption import Preemption\nPreemption().arm()\n"
        "signal.raise_signal(15)\nprint('one', flush=True)\nsignal.raise_signal(15)\nprint('two')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "one\n" and done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("when", ["at once", "while Python ends"])
@pytest.mark.parametrize("noted", [False, True])
def test_a_rank_that_leaves_by_the_signal_of_others_takes_its_own_later(when: str, noted: bool) -> None:
    """A launcher signals its ranks one after the other: the last may have left with the first by then."""
    arguments = [when, "noted"] if noted else [when]
    done = subprocess.run([sys.executable, "-c", LATE, *arguments], capture_output=True, text=True)
    expected = (-signal.SIGTERM, "") if noted else (0, "left")
    assert (done.returncode, done.stdout) == expected, done.stderr


def test_two_that_are_armed_give_the_signal_back_in_any_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        for first_leaves_first in (True, False):
            first, second = Preemption(), Preemption()
            first.arm()
            second.arm()
            for one in (first, second) if first_leaves_first else (second, first):
                one.disarm()
            os.kill(os.getpid(), signal.SIGTERM)
            assert not first.is_requested and not second.is_requested
            signal.signal(signal.SIGTERM, ours)
        assert received == [signal.SIGTERM, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
