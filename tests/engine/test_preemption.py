"""SIGTERM or Ctrl-C with `checkpoint.on_sigterm`: the step is finished, saved, and the job leaves."""

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.engine.step.preemption import Preemption
from tests.engine.saving import STEPS_AFTER, engine_for, load_and_go_on, run_steps
from tests.engine.scripts import run_on_ranks
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal

CASE = Case(mlp, vector_batch)


def preempted_case(folder: Path, **settings: object) -> Case:
    return CASE.at(0, config={"checkpoint": {"folder": str(folder), "on_sigterm": True, **settings}})


# -- a job -----------------------------------------------------------------------------------------------------------


def assert_goes_on(folder: Path) -> None:
    """The checkpoint has all of the steps that were taken: what follows is what would have followed."""
    target = CheckpointFolder(folder)
    target.open().verify()
    step = target.open().manifest.step
    assert 3 <= step < 2000 and target.tags() == [f"global_step{step}"] and target.unfinished() == []
    with engine_for(CASE, 1) as whole:
        expected = run_steps(whole, CASE, 0, step + STEPS_AFTER).losses
    found = load_and_go_on(CASE, folder, 1, f"global_step{step}", step).losses
    assert found == pytest.approx(expected[step:], rel=1e-3)


def interrupted(folder: Path) -> object:
    """What a rank leaves with where rank 1 has Ctrl-C after three steps."""
    case = preempted_case(folder, **{"async": True})  # it is saved in the background, and waited for
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


# -- whose signal it is ----------------------------------------------------------------------------------------------


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """The signals that reach the handler which was there before the engine."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_the_step_is_finished_saved_once_and_the_engine_closed(tmp_path: Path, handler: list[int]) -> None:
    case = preempted_case(tmp_path, every_steps=3)
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


def test_nothing_is_called_saved_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def commit(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "commit", commit)
    caplog.set_level(logging.INFO, "lowtide")
    engine = engine_for(preempted_case(tmp_path, **{"async": True}), 1)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run_steps(engine, CASE, 0, 1)
    engine.close()
    assert "could not be completed" in caplog.text and "is saved in" not in caplog.text


def test_a_second_signal_goes_to_whoever_had_it_before_and_all_when_the_engine_is_closed(
    tmp_path: Path, handler: list[int]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with engine_for(CASE, 1):  # without the setting
        assert signal.getsignal(signal.SIGTERM) is before
    with engine_for(preempted_case(tmp_path), 1):
        signal.raise_signal(signal.SIGTERM)
        assert handler == []
        signal.raise_signal(signal.SIGTERM)
        assert handler == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


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


def test_another_thread_cannot_receive_signals() -> None:
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(refusal(Preemption().arm)), name="trainer")
    thread.start()
    thread.join()
    assert texts == [
        "checkpoint.on_sigterm: expected lowtide.initialize in the main thread, which alone gets signals, found "
        "'trainer'"
    ]


@pytest.mark.parametrize(
    "words",
    [
        "checkpoint.on_sigterm: another open engine of this process has it too; a signal saves the newest alone",
        "checkpoint.folder: another open engine of this process saves into {} too, and the later checkpoint of a step "
        "replaces the earlier; give each engine a folder of its own",
    ],
)
def test_the_second_engine_of_a_process_says_what_is_not_saved(
    words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, words = preempted_case(tmp_path), words.format(tmp_path)
    for _ in range(2):
        with engine_for(case, 1):
            assert words not in caplog.text
    with engine_for(case, 1), engine_for(case, 1):
        assert words in caplog.text


def test_two_that_are_armed_give_the_signal_back_in_any_order(handler: list[int]) -> None:
    ours = signal.getsignal(signal.SIGTERM)
    for order in (1, -1):
        both = Preemption(), Preemption()
        for one in both:
            one.arm()
        for one in both[::order]:
            one.disarm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert all(one.noted is None for one in both)
        signal.signal(signal.SIGTERM, ours)
    assert handler == [signal.SIGTERM, signal.SIGTERM]


def test_another_thread_that_closes_the_engine_leaves_the_signal_to_whoever_had_it(handler: list[int]) -> None:
    before, preemption = signal.getsignal(signal.SIGINT), Preemption()
    preemption.arm()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(preemption.disarm).result()
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGINT, before)
    assert handler == [signal.SIGTERM] and preemption.noted is None


# What a module holds goes when Python has given its handlers up.
SCRIPT = """
import signal
from lowtide.engine.step.preemption import Preemption

class Sends:
    def __del__(self, kill=os.kill, process=os.getpid(), write=os.write):
        kill(process, 15)
        write(2, b"left")

preemption = Preemption()
preemption.arm()
if ways & {"noted", "twice"}:
    signal.raise_signal(15)
if "twice" in ways:
    os.write(2, b"one")
    signal.raise_signal(15)
preemption.leave()
preemption.disarm()
sends = Sends()
if "at once" in ways:
    del sends
"""


@pytest.mark.parametrize(
    ("ways", "status", "said"),
    [
        ({"twice"}, -signal.SIGTERM, "one"),  # without another handler the second signal ends the process
        *(({"noted", when}, -signal.SIGTERM, "") for when in ("at once", "while Python ends")),
        *(({when}, 0, "left") for when in ("at once", "while Python ends")),
    ],
)
def test_a_rank_that_leaves_by_the_signal_of_others_takes_its_own_later(
    tmp_path: Path, ways: set[str], status: int, said: str
) -> None:
    """A launcher signals its ranks one after the other: the last may have left with the first by then."""
    (end,) = run_on_ranks(1, f"ways = {ways}\n{SCRIPT}", tmp_path)
    assert (end.status, end.err) == (status, said)
