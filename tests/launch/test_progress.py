"""The record of a rank: always whole, whatever the rank does, and nothing where nobody has asked for it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.watch import record, stacks
from lowtide.watch.progress import Activity, Progress, RankProgress, Wait, read_progress

VARIABLE = "LOWTIDE_PROGRESS_FILE"
Read = Callable[[], RankProgress]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What this process was asked to report to, as rank 2."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "rank2"))
    return str(tmp_path / "rank2")


@pytest.fixture
def read(path: str) -> Read:
    def read() -> RankProgress:
        found = read_progress(path, 2)
        assert found is not None
        return found

    return read


@pytest.fixture
def progress(path: str) -> Progress:
    progress = Progress.of_this_process()
    progress.identify(2, 4)
    return progress


def test_what_a_rank_says_is_read(progress: Progress, read: Read) -> None:
    progress.set_limit(2.5)
    progress.end_step(12)
    progress.enter(Activity.FORWARD, 1)
    progress.at_unit("layers.7")
    sequence = [progress.begin(1), progress.begin(1), progress.begin(3)]
    progress.wait("gather of layers.7", 1, sequence[1], 2, 4, 3)
    found = read()
    assert (found.rank, found.world_size, found.pid, found.step) == (2, 4, os.getpid(), 12)
    assert (found.activity, found.unit, found.microbatch) == ("forward", "layers.7", 1)
    assert found.step_limit_seconds == 2.5 and found.step_seconds is not None and 0 <= found.step_seconds < 60
    assert sequence == [1, 2, 1] and found.begun == ((1, 2), (3, 1))
    assert found.wait is not None and found.wait.seconds <= found.activity_seconds < 60
    assert (found.wait.what, found.wait.sequence, [*found.wait.ranks]) == ("gather of layers.7", 2, [2, 6, 10])
    progress.end_wait()
    assert read().wait is None
    progress.wait("the norm", 0, 1, 0, 1, 2)
    assert read().wait is not None
    progress.enter(Activity.UPDATE)  # ends the wait
    assert read().wait is None


def test_where_nobody_asks_nothing_is_kept_until_it_is_turned_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    progress = Progress.of_this_process()
    progress.enter(Activity.FORWARD)
    progress.wait("the norm", 0, progress.begin(0), 0, 1, 2)
    assert not progress.is_on and progress.begin(0) == 0 and list(tmp_path.iterdir()) == []
    assert list(progress.drawn(iter([1, 2]))) == [1, 2]
    progress.turn_on()  # without a file, a process can read its own record
    progress.enter(Activity.BACKWARD)
    assert progress.snapshot().activity == "backward" and progress.snapshot().pid == os.getpid()


def test_the_record_survives_a_second_engine_of_the_process(progress: Progress, read: Read) -> None:
    progress.begin(1)
    progress.end_step(3)
    second = Progress.of_this_process()
    assert second.is_on and second.begin(5) == 1
    assert read().begun == ((1, 1), (5, 1)) and read().step == 3
    progress.enter(Activity.UPDATE)
    assert read().activity == "update"


def test_names_are_cut_at_the_size_of_their_field(progress: Progress, read: Read) -> None:
    progress.enter(Activity.FORWARD, 0, "é" * 200)
    progress.wait("x" + "é" * 300, 0, 1, 0, 1, 2)
    found = read()
    assert found.unit == "é" * 80 and found.wait is not None and found.wait.what == "x" + "é" * 119


HAMMER = """
import itertools, os
from lowtide.watch.progress import Activity, Progress
progress = Progress.of_this_process()
for number in itertools.count():
    progress.enter(Activity.FORWARD, number, f"{number} " * 20)
    progress.wait(f"{number} " * 30, 0, number + 1, number, 1, 1)
"""


@pytest.fixture
def busy_rank(path: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HAMMER])
    yield process
    process.kill()
    process.wait()


def number_of(found: RankProgress) -> int:
    """All the numbers that the parts of one activity, or of one wait, contain are the same."""
    numbers = {found.microbatch, *map(int, found.unit.split()[:20])}
    if found.wait is not None:
        words = found.wait.what.split()
        words = words[: min(30, 240 // (len(words[0]) + 1))]  # what the field has room for
        assert {*map(int, words)} == {found.wait.sequence - 1} == set(found.wait.ranks), found
    (number,) = numbers
    assert number is not None
    return number


def test_no_read_gives_the_halves_of_two_writes_and_a_rank_that_is_stopped_or_dead_is_read(
    busy_rank: subprocess.Popen[bytes], path: str
) -> None:
    seen: set[int] = set()
    deadline = time.monotonic() + 120
    while len(seen) < 500 and time.monotonic() < deadline:
        found = read_progress(path, 0)
        if found is not None and found.has_joined and found.activity == "forward":
            seen.add(number_of(found))
    assert len(seen) == 500
    for number in (signal.SIGSTOP, signal.SIGKILL):
        busy_rank.send_signal(number)
        os.waitid(os.P_PID, busy_rank.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        first, second = read_progress(path, 0), read_progress(path, 0)
        assert first is not None and second is not None and number_of(first) == number_of(second)


def test_a_write_that_was_cut_off_leaves_the_one_before(progress: Progress, read: Read, path: str) -> None:
    progress.enter(Activity.FORWARD, 1)
    progress.enter(Activity.FORWARD, 2)
    with open(path, "r+b") as file:
        whole = file.read()
        for offset in range(record.NBYTES - 8):  # where the newer one says microbatch 2
            if whole[offset : offset + 8] == bytes([5, 0, 0, 0, 2, 0, 0, 0]):
                file.seek(offset)
                file.write(b"\0\0\0\0\3")
    assert read().microbatch == 1


def test_before_import_there_is_nothing_and_after_it_a_start(path: str, read: Read) -> None:
    assert read_progress(path, 2) is None
    code = "import lowtide, sys; print('torch' in sys.modules, flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "False\n"
    found = read()
    assert (found.rank, found.pid, found.activity, found.has_joined) == (2, process.pid, "starting", False)
    time.sleep(max(0.0, 0.3 - found.activity_seconds))
    assert "File" in stacks.collect_stacks({2: path})[2]
    assert read().activity_seconds >= 0.3  # the stacks have changed its file
    process.communicate("")
    assert read_progress(path, 2) is None


def test_a_child_of_a_rank_leaves_its_record_alone(progress: Progress, read: Read) -> None:
    progress.enter(Activity.UPDATE)
    code = "import lowtide\nfrom lowtide.watch.progress import Progress\nprint(Progress.of_this_process().is_on)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert read().pid == os.getpid() and read().activity == "update"


def test_a_record_that_cannot_be_made_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "rank0"))
    with pytest.warns(UserWarning, match=r"LOWTIDE_PROGRESS_FILE=.*gone/rank0: no record of this rank's progress"):
        assert not Progress.of_this_process().is_on
    code = "import lowtide; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("imported\n", "")


# -- the step clock ------------------------------------------------------------------------------------------------


def test_the_clock_runs_from_the_first_step_on_and_starts_anew_with_each(progress: Progress, read: Read) -> None:
    progress.stop_clock(Activity.BEFORE_FIRST_STEP)
    assert read().step_seconds is None
    progress.enter(Activity.DATA_LOADING)
    time.sleep(0.02)
    progress.enter(Activity.FORWARD)
    assert (read().step_seconds or 0) >= 0.02
    ended = time.monotonic()
    progress.end_step(1)
    assert (read().step_seconds or 0) <= time.monotonic() - ended
    assert read().activity.startswith("between steps")
    with progress.during(Activity.SAVING):
        progress.stop_clock(Activity.CLOSED)  # what closes the engine meanwhile stays closed
    assert read().activity == "after engine.close()" and read().step_seconds is None


def test_what_is_not_part_of_a_step_has_a_clock_of_its_own(progress: Progress, read: Read) -> None:
    progress.stop_clock(Activity.BEFORE_FIRST_STEP)
    with progress.during(Activity.EVALUATION):
        assert read().activity == "evaluation" and read().step_seconds is not None
    assert read().activity == "before the first step" and read().step_seconds is None
    progress.end_step(1)
    time.sleep(0.02)
    began = time.monotonic()
    with progress.during(Activity.SAVING):
        assert (read().step_seconds or 0) <= time.monotonic() - began
        time.sleep(0.02)
        ended = time.monotonic()
    assert (read().step_seconds or 0) <= time.monotonic() - ended
    assert read().activity.startswith("between steps")


# -- as text -------------------------------------------------------------------------------------------------------


def test_waiting_for_a_microbatch_is_data_loading(progress: Progress, read: Read) -> None:
    def batches() -> Iterator[str]:
        for _ in range(2):
            yield str(read()).partition(" for ")[0]

    found = [(loading, str(read()).partition(" for ")[0]) for loading in progress.drawn(batches())]
    assert found == [
        (f"after step 0, data loading, microbatch {index}", f"after step 0, forward, microbatch {index}")
        for index in range(2)
    ]


GATHER = Wait("gather of layers.7", 1, 120, 0, 1, 4, 31.4)


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (
            RankProgress(1, 4, 7, 12, "forward", 33.2, "layers.7", 1, wait=GATHER),
            "after step 12, forward of layers.7, microbatch 1: waiting in gather of layers.7 (seq 120) for 31 s",
        ),
        (RankProgress(0, 1, 7, 3, "data loading", 5.4), "after step 3, data loading for 5 s"),
        (RankProgress(0, 1, 7, 0, "starting", 5.4), "starting for 5 s"),
        (
            RankProgress(0, 2, 7, 3, "pipeline action", 5, "2B0", wait=Wait("1RECV_B0", 3, 0, 1, 1, 1, 4.6)),
            "after step 3, pipeline action 2B0: waiting in 1RECV_B0 for 5 s",
        ),
    ],
)
def test_a_report_reads_as_a_sentence(report: RankProgress, text: str) -> None:
    assert str(report) == text
