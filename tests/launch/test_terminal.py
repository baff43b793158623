"""At a terminal: Ctrl-C goes to everyone in the foreground, and counts once."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.jobs import LAUNCH

COUNTS_SIGNALS = """
import os, pathlib, signal, sys, time
count = 0
def handle(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, handle)
rank = os.environ["RANK"]
pathlib.Path("ready" + rank).touch()
while not count:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path("count" + rank).write_text(str(count))
"""


def test_ctrl_c_reaches_every_rank_once_and_leaves_them_time(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COUNTS_SIGNALS)
    ours, theirs = pty.openpty()
    # The terminal sends signals to the foreground group of the session that it controls.
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", take, *LAUNCH, "--nproc", "2", "script.py"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path
    ) as process:
        os.close(theirs)
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.write(ours, b"\x03")
        assert process.wait(90) == 0
    os.close(ours)
    assert [(tmp_path / f"count{rank}").read_text() for rank in range(2)] == ["1", "1"]
