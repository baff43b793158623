"""Restarts: how often, on which hosts, and when there is none."""

import signal
from pathlib import Path

import pytest

from tests.launch import fakes
from tests.launch.jobs import Job

SAYS = """
import os, pathlib, signal, sys, time
attempt, host = os.environ["LOWTIDE_RESTART_COUNT"], os.environ.get("FAKE_HOST", "")
assert attempt == os.environ["TORCHELASTIC_RESTART_COUNT"] and os.environ["TORCHELASTIC_RUN_ID"]
with open("said", "a") as file:
    file.write(f"{attempt} {host} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
"""


def on_hosts(folder: Path, source: str, hosts: str, *options: str) -> Job:
    variables = fakes.install(folder / "bin", "ssh", fakes.SSH)
    return Job(folder, source, "--hosts", hosts, "--transport", "ssh", "--no-preflight", *options, variables=variables)


def said(folder: Path) -> set[str]:
    return set((folder / "said").read_text().splitlines())


def test_a_failed_job_starts_again_as_often_as_allowed(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, SAYS + "sys.exit(4)", "--nproc", "1", "--max-restarts", "2").finish()
    assert status == 4 and said(tmp_path) == {"0  0 of 1", "1  0 of 1", "2  0 of 1"}
    assert "restart 1 of 2 on " in err and "restart 2 of 2 on " in err and err.count("failed with exit status 4") == 3


def test_a_restart_that_ends_well_gives_status_0(tmp_path: Path) -> None:
    assert Job(tmp_path, SAYS + "sys.exit(attempt == '0')", "--nproc", "2", "--max-restarts", "5").finish()[0] == 0


def test_a_signal_starts_nothing_again(tmp_path: Path) -> None:
    job = Job(tmp_path, SAYS + "pathlib.Path('ready').touch(); time.sleep(60)", "--nproc", "1", "--max-restarts", "2")
    job.wait_for_files("ready")
    job.process.terminate()
    assert job.finish()[0] == 128 + signal.SIGTERM and said(tmp_path) == {"0  0 of 1"}


def test_a_lost_host_is_left_out_at_once(tmp_path: Path) -> None:
    source = SAYS + "if host == 'b': os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60 if attempt == '0' else 0)"
    status, _, err = on_hosts(tmp_path, source, "a:1,b:1", "--max-restarts", "1", "--min-hosts", "1").finish()
    assert status == 0, err
    assert "1 a 0 of 1" in said(tmp_path) and "lost host b" in err and "restart 1 of 1 on a\n" in err


def test_without_min_hosts_all_of_them_are_needed(tmp_path: Path) -> None:
    source = SAYS + "if host == 'b': os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    status, _, err = on_hosts(tmp_path, source, "a:1,b:1", "--max-restarts", "3").finish()
    assert status == 1 and "no restart: 1 hosts are left, the job needs at least 2" in err


def test_a_reserve_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    source = SAYS + "if host == 'b': os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60 if attempt == '0' else 0)"
    status, _, err = on_hosts(tmp_path, source, "a:1,b:1,c:1", "--max-restarts", "1", "--max-hosts", "2").finish()
    assert status == 0, err
    assert {"1 a 0 of 2", "1 c 1 of 2"} <= said(tmp_path) and not any(line.startswith("0 c") for line in said(tmp_path))


def test_a_host_that_fails_twice_in_a_row_is_left_out(tmp_path: Path) -> None:
    source = SAYS + "if host == 'b': sys.exit(6)\ntime.sleep(60 if int(attempt) < 2 else 0)"
    status, _, err = on_hosts(tmp_path, source, "a:1,b:1", "--max-restarts", "2", "--min-hosts", "1").finish()
    assert status == 0, err
    assert "b is excluded: the first failure was on it 2 times in a row" in err and "2 a 0 of 1" in said(tmp_path)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_host_that_cannot_be_reached_any_more_is_left_out_of_restarts_only(tmp_path: Path, restarts: str) -> None:
    gone = fakes.SSH.replace('host == "gone"', 'host == "b" and os.path.exists("said")')
    source = SAYS + "sys.exit(attempt == '0')"
    variables = fakes.install(tmp_path / "bin", "ssh", gone)
    where = ("--hosts", "a:1,b:1", "--transport", "ssh", "--no-preflight", "--min-hosts", "1")
    job = Job(tmp_path, source, *where, "--max-restarts", restarts, variables=variables)
    status, _, err = job.finish()
    assert status == (1 if restarts == "0" else 0), err
    assert ("The restart continues without b." in err) == (restarts == "1")
