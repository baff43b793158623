"""Restarts: how often, on which hosts, and when there is none."""

import signal
from pathlib import Path

import pytest

from tests.launch import fakes
from tests.launch.jobs import Job

SAYS = """
import os, pathlib, signal, sys, time
attempt, host, first = os.environ["LOWTIDE_RESTART_COUNT"], os.environ.get("FAKE_HOST", ""), "LOWTIDE_FIRST_WORLD_SIZE"
assert attempt == os.environ["TORCHELASTIC_RESTART_COUNT"] and os.environ["TORCHELASTIC_RUN_ID"]
with open("said", "a") as file:
    file.write(f"{attempt} {host} {os.environ['RANK']} of {os.environ['WORLD_SIZE']} first {os.environ[first]}\\n")
"""
LOST = "if host in '{}': os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60 if int(attempt) < {} else 0)"
ONE = ("--nproc", "1")
TERMINATED = 128 + signal.SIGTERM
WAITS = "pathlib.Path('ready').touch()\ntime.sleep(60)"
# Rank 1 fails, and rank 0 is asked to stop. It ends when it is asked again.
FAILS = """
ready, asked = pathlib.Path("0"), pathlib.Path("ready")
if os.environ["RANK"] == "1":
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(2)  # the clocks of host and launcher are compared each second
    sys.exit(4)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit() if asked.exists() else asked.touch())
ready.touch()
time.sleep(60)
"""


def on_hosts(folder: Path, source: str, hosts: str, *options: str, ssh: str = fakes.SSH) -> Job:
    """On hosts that are all this machine, by an ssh that is none."""
    variables = fakes.install(folder / "bin", "ssh", ssh)
    options = ("--hosts", hosts, "--transport", "ssh", "--no-preflight", *options)
    return Job(folder, SAYS + source, *options, variables=variables)


def said(folder: Path) -> set[str]:
    return {line.partition(" first ")[0] for line in (folder / "said").read_text().splitlines()}


def test_a_failed_job_starts_again_as_often_as_allowed(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, SAYS + "sys.exit(4)", *ONE, "--max-restarts", "2").finish()
    assert status == 4 and said(tmp_path) == {"0  0 of 1", "1  0 of 1", "2  0 of 1"}
    assert "restart 1 of 2 on " in err and "restart 2 of 2 on " in err and err.count("failed with exit status 4") == 3


@pytest.mark.parametrize(("source", "nproc", "expected"), [(WAITS, 1, {TERMINATED}), (FAILS, 2, {4, TERMINATED})])
def test_a_signal_starts_nothing_again(tmp_path: Path, source: str, nproc: int, expected: set[int]) -> None:
    job = Job(tmp_path, SAYS + source, "--nproc", str(nproc), "--max-restarts", "2")
    job.wait_for_files("ready")
    job.launcher.terminate()
    assert job.finish().status in expected and said(tmp_path) == {f"0  {rank} of {nproc}" for rank in range(nproc)}


@pytest.mark.parametrize(
    ("source", "hosts", "options", "expected", "has_said"),
    [
        (
            LOST.format("bc", 2),
            "a:1,b:1,c:1",
            ("--max-restarts", "2", "--max-hosts", "2", "--min-hosts", "1"),
            (0, ["lost host b", "restart 1 of 2 on a, c\n", "lost host c", "restart 2 of 2 on a\n"]),
            {"0 a 0 of 2", "0 b 1 of 2", "1 a 0 of 2", "1 c 1 of 2", "2 a 0 of 1"},
        ),
        (
            LOST.format("b", 1),
            "a:1,b:1",
            ("--max-restarts", "3"),
            (1, ["no restart: 1 hosts are left, the job needs at least 2"]),
            {"0 a 0 of 2", "0 b 1 of 2"},
        ),
        (
            "if host == 'b': sys.exit(6)\ntime.sleep(60 if int(attempt) < 2 else 0)",
            "a:1,b:1",
            ("--max-restarts", "2", "--min-hosts", "1"),
            (0, ["restart 1 of 2 on a, b\n", "b is excluded: the first failure was on it 2 times in a row"]),
            {"0 a 0 of 2", "0 b 1 of 2", "1 a 0 of 2", "1 b 1 of 2", "2 a 0 of 1"},
        ),
    ],
    ids=["lost_are_left_out", "all_are_needed", "fails_twice"],
)
def test_a_job_goes_on_with_the_hosts_that_are_left(
    tmp_path: Path,
    source: str,
    hosts: str,
    options: tuple[str, ...],
    expected: tuple[int, list[str]],
    has_said: set[str],
) -> None:
    status, _, err = on_hosts(tmp_path, source, hosts, *options).finish()
    assert status == expected[0] and all(text in err for text in expected[1]), err
    assert said(tmp_path) <= has_said and max(said(tmp_path)) == max(has_said)  # who is killed may have said nothing
    first = {line.partition(" first ")[2] for line in (tmp_path / "said").read_text().splitlines()}
    assert first == {"2"}  # every attempt is told how many ranks the first one had


def test_a_host_that_cannot_be_reached_any_more_is_left_out_of_a_restart(tmp_path: Path) -> None:
    """At the first start it ends the job: test_transports.py."""
    gone = fakes.SSH.replace('host == "gone"', 'host == "b" and os.path.exists("said")')
    options = ("--min-hosts", "1", "--max-restarts", "1")
    status, _, err = on_hosts(tmp_path, "sys.exit(attempt == '0')", "a:1,b:1", *options, ssh=gone).finish()
    assert status == 0 and "The restart continues without b." in err, err
