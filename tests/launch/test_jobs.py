"""The life of a job of one host: environment, failure of a rank, signals, and that nothing is left behind.

Whoever is killed, within five seconds no process of the job is left, orphans in sessions of their own included, and no
folder with the records of its ranks.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs import LAUNCH, Job
from tests.launch.scripts import (
    COUNTS_SIGNALS,
    HAS_DESCENDANTS,
    HEARS_SIGTERM,
    SLEEPS,
    WAITS_FOR_THE_OTHER,
    WRITES_ENVIRONMENT,
)

GONE_SECONDS = 5.0
TWO = ("--nproc", "2")


def started(folder: Path, source: str = SLEEPS, *options: str) -> Job:
    """A job of two ranks that sleep."""
    job = Job(folder, source, *TWO, *options)
    job.wait_for_files("ready0", "ready1")
    return job


def part(job: Job, name: str) -> psutil.Process:
    """The launcher, or its guard or agent, of which there is one each."""
    if name == "launcher":
        return job.launcher
    (found,) = (process for process in job.processes() if process.name() == f"lowtide {name}")
    return found


def records(job: Job) -> Path:
    """The folder that the job's ranks were given."""
    variables = [process.environ().get("LOWTIDE_PROGRESS_FILE") for process in job.processes()]
    (folder,) = {Path(path).parent for path in variables if path}
    assert folder.is_dir()
    return folder


def test_each_rank_has_the_environment_of_torchrun_and_its_share_of_the_cores(tmp_path: Path) -> None:
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as inside of a job of torchrun
    arguments = ["--lr", "1", "--", "x"]
    job = Job(tmp_path, WRITES_ENVIRONMENT, *TWO, "--bind", "cores", arguments=arguments, variables=variables)
    result = job.finish()
    assert result.status == 0, result
    found, given = zip(*(json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)), strict=True)
    assert given == (arguments, arguments)
    for rank, environ in enumerate(found):
        expected = {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens the store
        }
        assert {name: environ[name] for name in expected} == expected
    assert len({environ["MASTER_PORT"] for environ in found}) == 1 and int(found[0]["MASTER_PORT"]) > 1023
    allowed, shares = os.sched_getaffinity(0), [set(environ["cores"]) for environ in found]
    are_shares = all(shares) and not set.intersection(*shares) and set.union(*shares) <= allowed
    assert are_shares if len(allowed) > 1 else shares == [allowed] * 2  # two shares need two cores


ON_1 = "import os, signal, time\nif os.environ['RANK'] == '1': "
IGNORES_SIGTERM = (
    f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HAS_DESCENDANTS}{WAITS_FOR_THE_OTHER}"
    "sys.exit(9) if rank == '0' else time.sleep(600)"
)
FAILS_ON_1 = (
    f"{HAS_DESCENDANTS}{WAITS_FOR_THE_OTHER}print('the reason')\nsys.exit(5) if rank == '1' else time.sleep(600)"
)
AFTER_THE_END_OF_1 = """
import os, pathlib, time
process = pathlib.Path("process1")
if os.environ["RANK"] == "1":
    process.write_text(str(os.getpid()))
    os._exit(0)
while not process.exists() or pathlib.Path("/proc", process.read_text()).exists():  # until the agent knows of its end
    time.sleep(0.01)
"""
ITS_ID_IS_USED_AGAIN = f"""{AFTER_THE_END_OF_1}
newest = "/proc/sys/kernel/ns_last_pid"
if os.access(newest, os.W_OK) and os.fork() == 0:
    pathlib.Path(newest).write_text(str(int(process.read_text()) - 1))
    os._exit(3 if os.fork() == 0 else 0)  # the first is an orphan, which the agent adopts
time.sleep(1)
"""
ONE, LOGS = ("--nproc", "1"), "/proc/none/logs"  # a folder whose parent cannot be made
STOPPED = ") failed with exit status 5; the other ranks were stopped. The last lines of its output:"
HAD_ENDED = "failed with exit status 1. rank 1 had ended before with exit status 0: if rank 0 still trained, "
FAILURES: dict[str, tuple[str, tuple[str, ...], int, list[str]]] = {
    "success": (HAS_DESCENDANTS, TWO, 0, []),
    "fails": (
        FAILS_ON_1,
        TWO,
        5,
        ["lowtide launch: rank 1 of 2 (process ", STOPPED, "\n┌─ rank 1 ─", "\n│ the reason\n└──"],
    ),
    "crash": (
        f"{ON_1}import ctypes; ctypes.string_at(0)",
        TWO,
        128 + signal.SIGSEGV,
        ["was ended by SIGSEGV", "Fatal Python error: Segmentation fault"],
    ),
    "no_folder": (
        "",
        (*ONE, "--log-dir", LOGS),
        1,
        [f"started: --log-dir {LOGS}: expected a folder that every host can write", "directory: /proc/none. Name"],
    ),
    "had_ended": (f"{AFTER_THE_END_OF_1}os._exit(1)", TWO, 1, [HAD_ENDED]),
    "reused_id": (ITS_ID_IS_USED_AGAIN, TWO, 0, []),
    "ignores_sigterm": (IGNORES_SIGTERM, (*TWO, "--grace", "0.5"), 9, ["rank 0 of 2", "Its output is above.\n"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_job_ends_with_the_status_of_the_rank_that_failed_and_tells_why(tmp_path: Path, name: str) -> None:
    source, options, expected, told = FAILURES[name]
    start = time.monotonic()
    status, _, err = Job(tmp_path, source, *options).finish()
    assert status == expected and all(text in err for text in told), err
    assert bool(err) == bool(told)
    assert (0.5 if name == "ignores_sigterm" else 0.0) <= time.monotonic() - start < 60  # of 600


# -- signals --------------------------------------------------------------------------------------------------------


def test_a_signal_is_passed_on_and_gives_its_status(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder, own = records(job), job.launcher.cmdline()
    assert [part(job, name).cmdline() for name in ("guard", "agent")] == [own, own]  # no second Python
    job.launcher.send_signal(signal.SIGINT)
    status, out, err = job.finish()
    assert status == 128 + signal.SIGINT and "lowtide launch: stopped by SIGINT; no rank is left\n" in err
    assert "KeyboardInterrupt" in out and not folder.exists()


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does for a job that outlives the login
    job = started(tmp_path, HEARS_SIGTERM, "--grace", "600")
    signal.signal(signal.SIGHUP, before)
    job.launcher.send_signal(signal.SIGHUP)  # does not count
    job.launcher.terminate()
    job.wait_for_files("heard0", "heard1")  # a launcher that is slow to take it would take both for the same one
    time.sleep(0.3)
    assert job.process.poll() is None
    job.launcher.terminate()
    assert job.finish(timeout=60).status == 128 + signal.SIGTERM


# The terminal sends signals to the foreground group of the session that it controls. Its modes are as before the job.
AS_A_SHELL = """
import fcntl, signal, subprocess, sys, termios
signal.signal(signal.SIGINT, lambda number, frame: None)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
modes = termios.tcgetattr(0)
sys.exit(subprocess.call(sys.argv[1:]) or termios.tcgetattr(0) != modes)
"""


def test_ctrl_c_reaches_every_rank_once_and_leaves_them_time(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COUNTS_SIGNALS)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", AS_A_SHELL, *LAUNCH, *TWO, "script.py"]
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


# -- whoever is killed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victims", "said"),
    [
        (["launcher"], None),
        (["agent"], "lost the agent of this host: the connection ended (the agent was ended by SIGKILL)"),
        (["guard"], "the guard of the agent was killed, so the agent ends"),
        (["launcher", "agent"], None),
        (["agent", "guard"], ""),
    ],
    ids=["launcher", "agent", "guard", "launcher_and_agent", "agent_and_guard"],
)
def test_whoever_is_killed_nothing_is_left(tmp_path: Path, victims: list[str], said: str | None) -> None:
    job = started(tmp_path)
    folder = records(job)
    for process in [part(job, name) for name in victims]:
        process.kill()
    status, _, err = job.end(GONE_SECONDS)
    job.wait_until_gone(GONE_SECONDS)
    assert not folder.exists() or victims == ["agent", "guard"]  # then the next job removes it
    assert status == (128 + signal.SIGKILL if said is None else 1) and (said or "") in err


def test_records_that_are_left_when_all_are_killed_go_with_the_next_job(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder, everyone = records(job), job.processes()
    for process in everyone:
        process.suspend()
    for process in everyone:
        process.kill()
    job.end(GONE_SECONDS)
    job.wait_until_gone(GONE_SECONDS)
    assert folder.is_dir()
    (tmp_path / "next").mkdir()
    assert Job(tmp_path / "next", "", "--nproc", "1").finish().status == 0
    assert not folder.exists()


# -- how much work a launcher makes -----------------------------------------------------------------------------------

HEAVY = {"asyncio", "concurrent", "email.parser", "http", "lowtide.engine", "multiprocessing", "numpy", "psutil"}
HEAVY |= {"pydantic", "torch", "xml"}


def test_a_job_of_one_host_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ok')")
    code = (
        "import sys; from lowtide.bin.main import main; status = main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "launch", "--nproc", "1", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    modules = done.stderr.split()
    assert "lowtide.launch.job.launcher" in modules
    assert {name for name in modules if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)} == set()
