"""Ranks, agents, launchers and hosts that die, lines that are cut: nothing of the job is left, and the user is told.

Every rank has a child in a session of its own, which no signal to a process group reaches. A line that is cut while
the launcher goes on: test_hosts_jobs.py.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs import HostsJob
from tests.launch.network import Network

TWO_BY_TWO = ("--hosts", "n1:2,n2:2")
QUICK = ("--lost-after", "2")
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
    job = HostsJob(hosts, folder, WAIT, *TWO_BY_TWO, "--no-preflight", *options)
    job.wait_for_files(*[f"ready{rank}" for rank in range(4)])
    assert [process.name() for process in job.processes()].count("sleep") == 4
    return job


def kill_ssh(job: HostsJob) -> None:
    for process in job.network["login"].processes():
        if process.name() == "ssh":
            process.kill()


LOST_2 = "its 2 ranks are lost, and the other ranks were stopped"
NOT_LOOKED = "n2: could not look for processes that the job left there: no answer within 1 s"
FIND = "If that host is alive, find them there by `grep -lz LOWTIDE_JOB_ID="


@pytest.mark.parametrize(
    ("happens", "options", "seconds", "expected", "told"),
    [
        (lambda job: job.launcher.kill(), (), 5.0, 128 + signal.SIGKILL, []),
        (lambda job: job.agents("n2")[0].kill(), (), 5.0, 1, ["lost host n2: ", LOST_2]),  # guard; agent: test_jobs.py
        (kill_ssh, (), 5.0, 1, ["lost host n"]),
        (lambda job: job.network["login"].cut(), QUICK, 5.0, 1, ["lost host n"]),
        (
            lambda job: job.network["n2"].kill(),
            QUICK,
            5.0,
            1,
            ["lost host n2: nothing was heard from it for 2 s", NOT_LOOKED, FIND, "/proc/*/environ`."],
        ),
        (lambda job: job.agents("n2")[1].suspend(), QUICK, 7.0, 1, ["lost host n2"]),
    ],
    ids=["launcher", "guard", "ssh", "launcher_is_cut", "host_is_killed", "agent_is_stopped"],
)
def test_whatever_dies_nothing_is_left_on_any_host(
    hosts: Network,
    tmp_path: Path,
    happens: Callable[[HostsJob], object],
    options: tuple[str, ...],
    seconds: float,
    expected: int,
    told: list[str],
) -> None:
    job = waiting(hosts, tmp_path, *options)
    happens(job)
    job.wait_until_gone(seconds)
    result = job.end()
    assert result.status == expected and all(text in result.err for text in told), result
    assert result.err.count(NOT_LOOKED) <= 1


def test_an_interrupt_while_hosts_are_awaited_ends_at_once(hosts: Network, tmp_path: Path) -> None:
    hosts["n2"].cut()
    job = HostsJob(hosts, tmp_path, WAIT, *TWO_BY_TWO)
    job.wait_for(lambda: len(job.agents("n1")) == 2, "no agent on n1")
    job.launcher.send_signal(signal.SIGINT)
    job.wait_until_gone(3.0)
    assert job.end().status == 128 + signal.SIGINT


# -- what ranks have started in sessions of their own dies also where none of ours is left to do it -------------------


def kill_both(job: HostsJob, *hosts: str) -> None:
    """SIGKILL to guard and agent of each host, and none of them sees another one die."""
    processes: list[psutil.Process] = [process for host in hosts for process in job.agents(host)]
    assert len(processes) == 2 * len(hosts)
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def records(hosts: Network, host: str) -> list[str]:
    """The record folders of ranks on a host."""
    return [name for name in hosts[host].run("ls", "/dev/shm").split() if name.startswith("lowtide-")]


def test_agent_and_guard_that_are_killed_together_leave_nothing(hosts: Network, tmp_path: Path) -> None:
    job, names = waiting(hosts, tmp_path), ["n1", "n2"]
    assert [len(records(hosts, name)) for name in names] == [1, 1]
    kill_both(job, *names)
    result = job.end()
    job.wait_until_gone(job.hang_seconds)  # the sleeps of the ranks last longer
    assert result.status == 1 and "lost host n" in result.err and "could not look" not in result.err
    assert all(f"{name}: killed what the job had left there: sleep (process " in result.err for name in names)
    assert result.err.count("sleep (process ") == 2 * len(names)
    assert records(hosts, "n1") == records(hosts, "n2") == []
