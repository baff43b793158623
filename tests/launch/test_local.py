"""The life of a job: environment, failure of a rank, signals, and that nothing is left behind."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.launch.jobs import Job

WRITES_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path("rank" + os.environ["RANK"]).write_text(json.dumps([dict(os.environ), sys.argv[1:]]))
"""

# Each rank starts a child that has a child of its own in a new session, and the middle one ends: an orphan.
HAS_DESCENDANTS = """
import os, pathlib, subprocess, sys, time
rank = os.environ["RANK"]
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
code = f"import subprocess; subprocess.Popen({sleep}, start_new_session=True)"
subprocess.run([sys.executable, "-c", code])
subprocess.Popen(sleep)
pathlib.Path("ready" + rank).touch()
"""

SLEEPS = HAS_DESCENDANTS + "time.sleep(600)\n"

FAILS_ON_1 = (
    HAS_DESCENDANTS
    + """
if rank == "1":
    while not os.path.exists("ready0"):
        time.sleep(0.01)
    print("the reason")
    sys.exit(5)
time.sleep(600)
"""
)

IGNORES_SIGTERM = """
import os, signal, sys, time, pathlib
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready" + os.environ["RANK"]).touch()
if os.environ["RANK"] == "0":
    while not os.path.exists("ready1"):
        time.sleep(0.01)
    sys.exit(9)
time.sleep(600)
"""

HEARS_SIGTERM = """
import os, pathlib, signal, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda number, frame: pathlib.Path("heard" + rank).touch())
pathlib.Path("ready" + rank).touch()
time.sleep(600)
"""

SAVES_ON_SIGNAL = """
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("saved" + os.environ["RANK"]).write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready" + os.environ["RANK"]).touch()
time.sleep(600)
"""


def test_each_rank_has_the_environment_of_torchrun(tmp_path: Path) -> None:
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as inside of a job of torchrun
    arguments = ("--lr", "1", "--", "x")
    job = Job(tmp_path, WRITES_ENVIRONMENT, "--nproc", "2", arguments=arguments, variables=variables)
    status, _, _ = job.finish()
    assert status == 0
    ports = set()
    for rank in range(2):
        environ, arguments = json.loads((tmp_path / f"rank{rank}").read_text())
        assert arguments == ["--lr", "1", "--", "x"]
        expected = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert {name: environ[name] for name in expected} == expected
        assert (environ["MASTER_ADDR"], environ["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # rank 0 opens the store
        ports.add(int(environ["MASTER_PORT"]))
    assert len(ports) == 1 and ports.pop() > 1023


def test_success_leaves_nothing_behind(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, HAS_DESCENDANTS, "--nproc", "2").finish()
    assert (status, err) == (0, "")


def test_a_failing_rank_stops_all_and_gives_its_status_and_last_lines(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, FAILS_ON_1, "--nproc", "2").finish()
    assert status == 5
    assert "lowtide launch: rank 1 of 2 (process " in err
    assert ") failed with exit status 5; the other ranks were stopped. The last lines of its output:" in err
    assert "\n┌─ rank 1 ─" in err and "\n│ the reason\n└──" in err


def test_a_failing_rank_0_points_to_its_output(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, "raise SystemExit(4)", "--nproc", "1").finish()
    assert status == 4 and err.endswith("failed with exit status 4. Its output is above.\n")


def test_a_silent_rank_is_said_to_be_silent(tmp_path: Path) -> None:
    source = "import os, time; os._exit(6) if os.environ['RANK'] == '1' else time.sleep(60)"
    status, _, err = Job(tmp_path, source, "--nproc", "2").finish()
    assert status == 6 and err.endswith("the other ranks were stopped. It printed nothing.\n")


def test_sigkill_of_a_rank_names_the_out_of_memory_killer(tmp_path: Path) -> None:
    source = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    status, _, err = Job(tmp_path, source, "--nproc", "2").finish()
    assert status == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in err and "A usual cause is the kernel's out-of-memory killer" in err


def test_a_crash_names_its_signal(tmp_path: Path) -> None:
    source = "import ctypes, os\nif os.environ['RANK'] == '1': ctypes.string_at(0)"
    status, _, err = Job(tmp_path, source, "--nproc", "2").finish()
    assert status == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV" in err and "Fatal Python error: Segmentation fault" in err


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    start = time.monotonic()
    status, _, err = Job(tmp_path, IGNORES_SIGTERM, "--nproc", "2", "--grace", "0.5").finish()
    assert status == 9 and "rank 0 of 2" in err
    assert 0.5 <= time.monotonic() - start < 60  # of 600


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_gives_its_status(tmp_path: Path, number: signal.Signals) -> None:
    job = Job(tmp_path, SLEEPS, "--nproc", "2")
    job.wait_for_files("ready0", "ready1")
    job.process.send_signal(number)
    status, out, err = job.finish()
    assert status == 128 + number and f"lowtide launch: stopped by {number.name}; no rank is left\n" in err
    assert ("KeyboardInterrupt" in out) == (number == signal.SIGINT)


def test_ranks_that_end_well_on_a_signal_give_status_0(tmp_path: Path) -> None:
    job = Job(tmp_path, SAVES_ON_SIGNAL, "--nproc", "2")
    job.wait_for_files("ready0", "ready1")
    job.process.terminate()
    assert job.finish() == (0, "", "")
    assert (tmp_path / "saved0").read_text() == (tmp_path / "saved1").read_text() == "15"


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, HEARS_SIGTERM, "--nproc", "2", "--grace", "600")
    job.wait_for_files("ready0", "ready1")
    job.process.terminate()
    job.wait_for_files("heard0", "heard1")  # a launcher that is slow to take it would take both for the same one
    time.sleep(0.3)
    assert job.process.poll() is None
    job.process.terminate()
    assert job.finish(timeout=60)[0] == 128 + signal.SIGTERM
