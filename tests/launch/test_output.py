"""What the user sees of the ranks' output, and what goes to files: whole lines in order, equal ones of ranks as one."""

import os
import pty
import random
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lowtide.launch.agent.host_ranks import KEPT_LINES, RankOutput
from lowtide.launch.job.display import Display, Folding, Line
from lowtide.launch.wire.loop import Loop
from lowtide.watch.waiting import rank_range
from tests.launch.jobs import LAUNCH, Job

TWO = ("--nproc", "2")
SAYS = """
import os
rank = os.environ["RANK"]
os.write(1, f"out {rank}\\n".encode())
os.write(2, f"err {rank}\\n".encode())
"""
FAILS_AFTER_RANK_0 = """
import pathlib, sys, time
said = pathlib.Path(sys.argv[1])
if rank == "0":
    said.touch()
while not said.exists():
    time.sleep(0.01)
if rank == "1":
    raise ValueError("bad row 17")
"""
NUM_LINES = 6000  # of each rank: more than twice what pipes, the agent's window and the launcher hold
FLOODS = f"""
import os, sys
for number in range({NUM_LINES}):
    print(f"{{number:06d}}", "x" * 90)
"""


def test_rank_0_is_shown_plainly_others_have_a_prefix_and_each_has_a_file(tmp_path: Path) -> None:
    status, out, err = Job(tmp_path, SAYS, "--nproc", "3", "--log-dir", "deep/logs").finish()
    assert (status, err) == (0, "")
    of_others = ["[rank 1] err 1", "[rank 1] out 1", "[rank 2] err 2", "[rank 2] out 2"]
    assert sorted(out.splitlines()) == [*of_others, "err 0", "out 0"]
    for rank in range(3):
        lines = (tmp_path / f"deep/logs/rank{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]


def test_quiet_ranks_shows_rank_0_and_why_another_one_failed(tmp_path: Path) -> None:
    job = Job(tmp_path, SAYS + FAILS_AFTER_RANK_0, *TWO, "--quiet-ranks", arguments=[str(tmp_path / "said")])
    status, out, err = job.finish()
    assert (status, out) == (1, "out 0\n") and err.startswith("err 0\n") and "│ ValueError: bad row 17\n" in err


def output_of(
    *said: bytes, is_plain: bool = False, log: Path | None = None
) -> tuple[bytes, tuple[str, ...], list[str]]:
    """What is shown of a rank that has said this and ended, its last lines, and what is told of its log."""
    notes: list[str] = []
    read_fd, write_fd = os.pipe()
    output = RankOutput(read_fd, is_plain, log, notes.append)
    shown = b""
    for chunk in said:
        os.write(write_fd, chunk)
        shown += output.read_what_is_there()
    os.close(write_fd)
    last_lines = output.last_lines()
    return shown + output.close(), last_lines, notes


def test_a_progress_bar_of_another_rank_is_one_line() -> None:
    bar = [*(f"\rstep {step}".encode() for step in range(5)), b"\n"]
    assert output_of(*bar)[0] == b"step 4\n" and output_of(*bar, is_plain=True)[0] == b"".join(bar)


def test_output_without_a_final_newline_is_complete() -> None:
    assert output_of(*[b"x" * 50_000] * 4)[0] == b"x" * 200_000 + b"\n"


def test_rank_0_keeps_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    asks = "sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.write_through"
    script.write_text(f"import sys; print({asks})")
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    command = [*LAUNCH, *TWO, str(script)]
    with subprocess.Popen(command, **streams, start_new_session=True, env=environment) as process:
        assert process.wait(120) == 0
    os.close(theirs)
    text = " ".join(os.read(ours, 10_000).decode().split())
    os.close(ours)
    assert "True True True False" in text and "[rank 1]\x1b[0m False False False True" in text


def test_lines_of_rank_0_in_a_batch_log_are_whole(tmp_path: Path) -> None:
    """Rank 0 writes its line in pieces, and rank 1 a line between them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nis_0 = os.environ['RANK'] == '0'\nsys.stdout.write('a ')\n"
        "time.sleep(1.0 if is_0 else 0.0)\nprint('b')\n"
    )
    with (tmp_path / "log").open("w") as log:
        assert subprocess.run([*LAUNCH, *TWO, str(script)], stdout=log, stderr=log, timeout=120).returncode == 0
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["[rank 1] a b", "a b"]


def test_a_line_of_rank_0_without_an_end_is_shown_and_not_kept(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    display, chunks = Display(loop), [b"\r", *[b"x" * 65536] * 16]
    for chunk in chunks:
        display._take_plain(chunk)
    assert len(display._plain_open) < 1 << 16 and len(capfd.readouterr().out) == len(b"".join(chunks))


def test_a_slow_reader_gets_every_line_whole(tmp_path: Path) -> None:
    """Through pipes that hold a fraction of it, to a reader that starts late: the ranks wait."""
    job = Job(tmp_path, FLOODS, "--nproc", "3", "--log-dir", "logs")
    time.sleep(1.5)
    assert job.process.poll() is None
    status, out, _ = job.finish(timeout=180)
    assert status == 0
    lines = [f"{number:06d} {'x' * 90}" for number in range(NUM_LINES)]
    got = out.splitlines()
    assert [line for line in got if not line.startswith("[")] == lines
    for rank in (1, 2):
        mine = [line.partition("] ")[2] for line in got if line.startswith((f"[rank {rank}]", "[ranks 1-2]"))]
        assert mine == lines
    assert (tmp_path / "logs/rank2.log").read_text().splitlines() == lines


def test_a_reader_that_goes_away_does_not_stop_the_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path, FLOODS + "open('done' + os.environ['RANK'], 'w')", *TWO, "--log-dir", "logs")
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(180) == 0 and job.processes() == []
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
    job.process.communicate()


def test_the_last_lines_are_the_whole_traceback() -> None:
    def deeper(number: int) -> None:
        deeper(number - 1) if number else [][0]

    try:
        try:
            deeper(20)
        except IndexError as error:
            raise ValueError("outer") from error
    except ValueError:
        text = traceback.format_exc()
    lines = [f"before {number}" for number in range(50)]
    assert output_of("\n".join([*lines, text]).encode())[1] == tuple(text.splitlines())
    assert output_of("\n".join(lines).encode())[1] == tuple(lines[-KEPT_LINES:])


def test_a_full_disk_is_told_once_and_the_ranks_go_on(tmp_path: Path) -> None:
    shown, _, notes = output_of(b"one\n", b"two\n", log=Path("/dev/full"))
    assert shown == b"one\ntwo\n"
    assert notes == ["/dev/full cannot be written: No space left on device. The ranks continue without this log"]
    source = "import os\nif os.environ['RANK'] == '1':\n    for i in range(8000): print(i, 'x' * 60)"
    (tmp_path / "script.py").write_text(source)
    with open("/dev/full", "wb") as full:
        command = [*LAUNCH, *TWO, "script.py"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stdout cannot be written to: No space left on device. The ranks continue") == 1


def test_logs_go_on_after_a_restart(tmp_path: Path) -> None:
    source = "import os\ncount = int(os.environ['LOWTIDE_RESTART_COUNT'])\nprint('attempt', count)\nexit(1 - count)"
    options = ("--nproc", "1", "--max-restarts", "1", "--log-dir", "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank0.log").write_text("of another job\n")
    assert Job(tmp_path, source, *options).finish().status == 0
    assert (tmp_path / "logs/rank0.log").read_text() == "attempt 0\nattempt 1\n"


# -- equal lines ----------------------------------------------------------------------------------------------------


def test_equal_lines_of_ranks_are_one(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.launch.job.display.time", Mock(monotonic=lambda: 0.0))  # all come within the window
    display = Display(loop)
    display.open(dict.fromkeys(range(4), "a host"), dict.fromkeys(range(4), Mock(index=0)))
    for rank in range(4):
        display.output(rank, "loading\n")
    display.close(Mock(count=0))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[ranks 1-3] loading", "loading"]


def shown(lines: list[Line]) -> list[tuple[str, str]]:
    return [(rank_range(line.ranks), line.text.decode()) for line in lines]


def test_a_line_waits_for_others_no_longer_than_the_window() -> None:
    folding = Folding(num_ranks=3)
    folding.add(0, b"a", 0.0)
    folding.add(1, b"a", 0.15)
    assert folding.take(0.19) == [] and folding.seconds_to_wait(0.15) == pytest.approx(0.05)
    assert shown(folding.take(0.2)) == [("0-1", "a")]
    folding.add(2, b"a", 0.21)
    assert shown(folding.take(0.5)) == [("2", "a")] and folding.seconds_to_wait(0.5) is None


@pytest.mark.parametrize(
    ("num_ranks", "said", "now", "expected"),
    [
        (5, [(rank, "loading") for rank in (3, 0, 1, 6, 2)], 0.1, [("0-3,6", "loading")]),  # nothing to wait for
        (3, [(rank, text) for rank in (0, 1) for text in "aba"], 1.0, [("0-1", "a"), ("0-1", "b"), ("0-1", "a")]),
        (3, [(0, "a"), (0, "b"), (1, "b"), (1, "a")], 1.0, [("0", "a"), ("0-1", "b"), ("1", "a")]),
    ],
    ids=["all_have_said_it", "sequences", "order"],
)
def test_equal_lines_are_folded_and_each_rank_keeps_its_order(
    num_ranks: int, said: list[tuple[int, str]], now: float, expected: list[tuple[str, str]]
) -> None:
    folding = Folding(num_ranks)
    for rank, text in said:
        folding.add(rank, text.encode(), 0.1)
    assert shown(folding.take(now)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_no_line_is_lost_and_no_order_changes(seed: int) -> None:
    chance = random.Random(seed)
    folding = Folding(num_ranks=7)
    said: dict[int, list[bytes]] = {rank: [] for rank in range(7)}
    heard: dict[int, list[bytes]] = {rank: [] for rank in range(7)}
    lines = []
    for step in range(3000):
        rank, text = chance.randrange(7), bytes([chance.choice(b"abc")])
        said[rank].append(text)
        folding.add(rank, text, step / 100)
        lines += folding.take(step / 100)
    for line in [*lines, *folding.take(0.0, everything=True)]:
        for rank in line.ranks:
            heard[rank].append(line.text)
    assert heard == said


def test_held_lines_are_bounded() -> None:
    folding = Folding(num_ranks=2)
    for number in range(5000):
        folding.add(0, str(number).encode(), 0.0)
    assert [line.text for line in folding.take(0.0)] == [str(number).encode() for number in range(3000)]
