"""Ranks, agents, launchers and hosts that die, lines that are cut: nothing of the job is left, and the user is told.

Every rank has a child in a session of its own, which no signal to a process group reaches.
"""

import signal
from pathlib import Path

import psutil
import pytest

from tests.launch.hosts_job import HostsJob
from tests.launch.network import Network

TWO_BY_TWO = ("--hosts", "n1:2,n2:2", "--no-preflight")
GONE_SECONDS = 5.0
CUT_SECONDS = 7.0  # a cut is noticed by 4 to 5 s of silence, and then the host is tried for another second

WAIT = """
import os, pathlib, subprocess, sys, time
rank = os.environ["RANK"]
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(f"ready{rank}").touch()
while not pathlib.Path(f"fail{rank}").exists():
    time.sleep(0.02)
print("rank", rank, "has come to an end", file=sys.stderr)
raise ValueError("bad row 17")
"""


def waiting(hosts: Network, folder: Path, *options: str) -> HostsJob:
    """Two ranks on each of two hosts, all of them waiting."""
    job = HostsJob(hosts, folder, WAIT, *TWO_BY_TWO, *options)
    job.wait_for_files(*[f"ready{rank}" for rank in range(4)])
    assert [process.name() for process in job.processes()].count("sleep") == 4
    return job


@pytest.fixture
def job(hosts: Network, tmp_path: Path) -> HostsJob:
    """See `waiting`."""
    return waiting(hosts, tmp_path)


def agents(job: HostsJob, host: str) -> list[psutil.Process]:
    """The agent and its guard on a host, the outer one first."""
    found = [
        process for process in job.network[host].processes() if process.name() in ("lowtide guard", "lowtide agent")
    ]
    return sorted(found, key=lambda process: process.name(), reverse=True)


def test_a_rank_that_fails_ends_the_job_with_its_status(job: HostsJob) -> None:
    (job.folder / "fail3").touch()
    result = job.finish()
    job.wait_until_gone(0.5)
    assert result.status == 1
    assert "rank 3 of 4 (host n2, process " in result.err
    assert "failed with exit status 1; the other ranks were stopped" in result.err
    assert "host n2, rank 3 ─" in result.err
    assert "│ Traceback (most recent call last):" in result.err and "│ ValueError: bad row 17" in result.err


def test_a_killed_launcher_leaves_nothing_on_any_host(job: HostsJob) -> None:
    job.send(signal.SIGKILL)
    job.wait_until_gone(GONE_SECONDS)
    assert job.finish().status == 128 + signal.SIGKILL


def test_a_killed_guard_leaves_nothing_on_any_host(job: HostsJob) -> None:
    """With its agent; that of an agent alone is in `test_failures.py`."""
    guard, _ = agents(job, "n2")
    guard.kill()
    job.wait_until_gone(GONE_SECONDS)
    result = job.finish()
    assert result.status == 1
    assert "lost host n2: " in result.err and "its 2 ranks are lost, and the other ranks were stopped" in result.err


def test_killed_ssh_leaves_nothing_on_any_host(job: HostsJob) -> None:
    for process in job.network["login"].processes():
        if process.name() == "ssh":
            process.kill()
    job.wait_until_gone(GONE_SECONDS)
    result = job.finish()
    assert result.status == 1 and "lost host n" in result.err


def test_a_cut_link_ends_both_sides_and_the_host_is_named(job: HostsJob) -> None:
    job.network["n1"].cut()
    job.wait_until_gone(CUT_SECONDS)
    result = job.finish()
    assert result.status == 1
    assert "lost host n1: nothing was heard from it for 4 s" in result.err
    assert "its 2 ranks are lost, and the other ranks were stopped" in result.err


def test_a_launcher_that_is_cut_off_ends_with_all_its_hosts(hosts: Network, tmp_path: Path) -> None:
    job = waiting(hosts, tmp_path, "--lost-after", "2")
    hosts["login"].cut()
    job.wait_until_gone(CUT_SECONDS - 2)
    result = job.finish()
    assert result.status == 1 and "lost host n" in result.err


def test_a_killed_host_ends_the_job(hosts: Network, tmp_path: Path) -> None:
    job = waiting(hosts, tmp_path, "--lost-after", "2")
    hosts["n2"].kill()
    job.wait_until_gone(CUT_SECONDS - 2)
    result = job.finish()
    assert result.status == 1 and "lost host n2: nothing was heard from it for 2 s" in result.err
    assert result.err.count("n2: could not look for processes that the job left there: no answer within 1 s") == 1
    assert "If that host is alive, find them there by `grep -lz LOWTIDE_JOB_ID=" in result.err
    assert "/proc/*/environ`." in result.err


def test_a_stopped_agent_is_a_lost_one(hosts: Network, tmp_path: Path) -> None:
    job = waiting(hosts, tmp_path, "--lost-after", "2")
    _, agent = agents(job, "n2")
    agent.suspend()
    job.wait_until_gone(CUT_SECONDS)
    result = job.finish()
    assert result.status == 1 and "lost host n2" in result.err


def test_an_interrupt_while_hosts_are_awaited_ends_at_once(hosts: Network, tmp_path: Path) -> None:
    hosts["n2"].cut()
    job = HostsJob(hosts, tmp_path, WAIT, *TWO_BY_TWO)
    job.wait_for(lambda: len(agents(job, "n1")) == 2, "no agent on n1")
    job.send(signal.SIGINT)
    job.wait_until_gone(3.0)
    assert job.finish().status == 128 + signal.SIGINT
