"""What the user sees of the ranks' output, and what goes to files."""

import os
import pty
import subprocess
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
    assert status == 1 and out == "" and "    ValueError: bad row 17" in err


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
    script.write_text("import sys; print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())")
    ours, theirs = pty.openpty()
    command = [*LAUNCH, "--nproc", "2", str(script)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        assert process.wait(30) == 0
    os.close(theirs)
    lines = os.read(ours, 10_000).decode().split()
    os.close(ours)
    text = " ".join(lines)
    assert "True True True" in text and "[rank 1] False False False" in text
