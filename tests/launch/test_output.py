"""What the user sees of the ranks' output, and what goes to files."""

import os
import pty
import subprocess
import time
from pathlib import Path

from tests.launch.jobs import LAUNCH, Job

SAYS = """
import os
rank = os.environ["RANK"]
os.write(1, f"out {rank}\\n".encode())
os.write(2, f"err {rank}\\n".encode())
"""

BAR = """
import os, sys
for step in range(5):
    sys.stdout.write(f"\\rstep {step}")
print()
"""


def test_rank_0_is_shown_plainly_and_others_have_a_prefix(tmp_path: Path) -> None:
    status, out, err = Job(tmp_path, SAYS, "--nproc", "3").finish()
    assert status == 0
    assert sorted(out.splitlines()) == ["[rank 1] err 1", "[rank 1] out 1", "[rank 2] err 2", "[rank 2] out 2", "out 0"]
    assert err == "err 0\n"


def test_quiet_ranks_shows_rank_0_only(tmp_path: Path) -> None:
    assert Job(tmp_path, SAYS, "--nproc", "2", "--quiet-ranks").finish() == (0, "out 0\n", "err 0\n")


def test_quiet_ranks_still_shows_why_a_rank_failed(tmp_path: Path) -> None:
    source = "import os\nif os.environ['RANK'] == '1': raise ValueError('bad row 17')"
    status, out, err = Job(tmp_path, source, "--nproc", "2", "--quiet-ranks").finish()
    assert status == 1 and out == "" and "│ ValueError: bad row 17\n" in err


def test_log_dir_has_one_file_per_rank_and_the_terminal_stays_the_same(tmp_path: Path) -> None:
    status, out, _ = Job(tmp_path, SAYS, "--nproc", "2", "--log-dir", "deep/logs").finish()
    assert status == 0
    assert sorted(out.splitlines()) == ["[rank 1] err 1", "[rank 1] out 1", "err 0", "out 0"]
    assert sorted((tmp_path / "deep/logs/rank0.log").read_text().splitlines()) == ["err 0", "out 0"]
    assert sorted((tmp_path / "deep/logs/rank1.log").read_text().splitlines()) == ["err 1", "out 1"]


def test_a_progress_bar_of_another_rank_is_one_line(tmp_path: Path) -> None:
    _, out, _ = Job(tmp_path, BAR, "--nproc", "2").finish()
    assert out.count("[rank 1]") == 1 and "[rank 1] step 4\n" in out
    assert out.count("step 2") == 1  # the raw bar of rank 0


def test_output_without_a_final_newline_is_complete(tmp_path: Path) -> None:
    source = "import os\nif os.environ['RANK'] == '1': print('x' * 200_000, end='')"
    _, out, _ = Job(tmp_path, source, "--nproc", "2").finish()
    assert out == "[rank 1] " + "x" * 200_000 + "\n"


def test_rank_0_keeps_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    asks = "sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.write_through"
    script.write_text(f"import sys; print({asks})")
    ours, theirs = pty.openpty()
    command = [*LAUNCH, "--nproc", "2", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    ) as process:
        assert process.wait(30) == 0
    os.close(theirs)
    lines = os.read(ours, 10_000).decode().split()
    os.close(ours)
    text = " ".join(lines)
    assert "True True True False" in text and "[rank 1]\x1b[0m False False False True" in text


FLOODS = """
import os, sys
for number in range(20_000):
    print(f"{number:06d}", "x" * 90)
"""


def test_a_slow_reader_gets_every_line_whole(tmp_path: Path) -> None:
    """4 MB through pipes that hold a fraction of it, to a reader that starts late: the ranks wait."""
    job = Job(tmp_path, FLOODS, "--nproc", "3", "--log-dir", "logs")
    time.sleep(1.5)
    assert job.process.poll() is None
    status, out, _ = job.finish(timeout=180)
    assert status == 0
    lines = [f"{number:06d} {'x' * 90}" for number in range(20_000)]
    got = out.splitlines()
    assert [line for line in got if not line.startswith("[")] == lines
    for rank in (1, 2):
        mine = [line.partition("] ")[2] for line in got if line.startswith((f"[rank {rank}]", "[ranks 1-2]"))]
        assert mine == lines
    assert (tmp_path / "logs/rank2.log").read_text().splitlines() == lines


def test_a_reader_that_goes_away_does_not_stop_the_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path, FLOODS + "open('done' + os.environ['RANK'], 'w')", "--nproc", "2", "--log-dir", "logs")
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(180) == 0 and job.survivors() == []
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
    job.process.communicate()


def test_equal_lines_of_ranks_are_one(tmp_path: Path) -> None:
    source = """
import os, pathlib, time
pathlib.Path("ready" + os.environ["RANK"]).touch()
while not all(pathlib.Path(f"ready{rank}").exists() for rank in range(4)):
    time.sleep(0.001)
time.sleep(0.1)
print("loading")
"""
    for _ in range(10):  # on a busy machine they may not come together
        _, out, _ = Job(tmp_path, source, "--nproc", "4").finish()
        lines = sorted(out.splitlines())
        if len(lines) == 2:
            break
    assert lines == ["[ranks 1-3] loading", "loading"]


def test_the_box_has_the_whole_traceback(tmp_path: Path) -> None:
    source = """
import os
def deeper(n):
    return deeper(n - 1) + 1 if n else [][0]
def middle(n):
    try:
        deeper(2)
    except IndexError as error:
        raise ValueError("outer") from error
if os.environ["RANK"] == "1":
    for line in range(50):
        print("before", line)
    middle(1)
"""
    _, _, err = Job(tmp_path, source, "--nproc", "2").finish()
    box = err.partition("┌─ rank 1 ─")[2]
    assert box.count("│ Traceback (most recent call last):") == 2
    assert "│ IndexError: list index out of range" in box and "│ ValueError: outer" in box and "before" not in box


def test_a_full_disk_of_logs_is_told_and_the_ranks_go_on(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank1.log").symlink_to("/dev/full")
    status, out, err = Job(tmp_path, SAYS, "--nproc", "2", "--log-dir", "logs").finish()
    assert status == 0 and "[rank 1] err 1" in out
    assert "logs/rank1.log cannot be written: No space left on device. The ranks continue" in err


def test_a_full_disk_of_stdout_is_told_once_and_the_ranks_go_on(tmp_path: Path) -> None:
    source = "import os\nif os.environ['RANK'] == '1':\n    for i in range(20000):\n        print(i, 'x' * 60)"
    (tmp_path / "script.py").write_text(source)
    with open("/dev/full", "wb") as full:
        command = [*LAUNCH, "--nproc", "2", "script.py"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stdout cannot be written to: No space left on device. The ranks continue") == 1


def test_logs_go_on_after_a_restart(tmp_path: Path) -> None:
    source = "import os\ncount = int(os.environ['LOWTIDE_RESTART_COUNT'])\nprint('attempt', count)\nexit(1 - count)"
    options = ("--nproc", "1", "--max-restarts", "1", "--log-dir", "logs")
    for _ in range(2):  # another job begins them anew
        assert Job(tmp_path, source, *options).finish()[0] == 0
        assert (tmp_path / "logs/rank0.log").read_text() == "attempt 0\nattempt 1\n"
