"""Whoever is killed, within five seconds no process of the job is left, orphans in sessions of their own included.

Nor is the folder with the records of its ranks.
"""

import signal
from pathlib import Path

import psutil

from tests.launch import fakes
from tests.launch.jobs import Job
from tests.launch.test_local import SLEEPS

SECONDS = 5.0


def started(folder: Path, *options: str, variables: dict[str, str] | None = None, num_ranks: int = 2) -> Job:
    """A job whose ranks have orphans, and sleep."""
    job = Job(folder, SLEEPS, *(options or ("--nproc", "2")), variables=variables)
    job.wait_for_files(*(f"ready{rank}" for rank in range(num_ranks)))
    return job


def guards(job: Job) -> list[psutil.Process]:
    """One per host."""
    return [process for process in job.survivors() if process.name() == "lowtide guard"]


def agents(job: Job) -> list[psutil.Process]:
    """One per host, the child of its guard."""
    return [process for process in job.survivors() if process.name() == "lowtide agent"]


def ranks(job: Job) -> list[psutil.Process]:
    return [child for agent in agents(job) for child in agent.children() if "script.py" in " ".join(child.cmdline())]


def records(job: Job) -> Path:
    """The folder that the job's ranks were given."""
    variables = [process.environ().get("LOWTIDE_PROGRESS_FILE") for process in job.survivors()]
    (folder,) = {Path(path).parent for path in variables if path}
    assert folder.is_dir()
    return folder


def test_the_launcher_is_killed(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder = records(job)
    assert len(ranks(job)) == 2
    job.process.kill()
    job.process.communicate()
    assert job.survivors(wait=SECONDS) == [] and not folder.exists()


def test_the_agent_is_killed(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder = records(job)
    agents(job)[0].kill()
    status, _, err = job.finish(timeout=SECONDS)
    assert not folder.exists()
    assert status == 1 and "lost the agent of this host: the connection ended (the agent was ended by SIGKILL)" in err


def test_the_guard_is_killed(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder = records(job)
    guards(job)[0].kill()
    status, _, err = job.finish(timeout=SECONDS)
    assert not folder.exists()
    assert status == 1 and "the guard of the agent was killed, so the agent ends" in err


def test_agent_and_guard_are_killed_together(tmp_path: Path) -> None:
    job = started(tmp_path)
    for process in (*agents(job), *guards(job)):
        process.kill()
    assert job.finish(timeout=SECONDS)[0] == 1


def test_launcher_and_agent_are_killed_one_after_the_other(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder, (agent,) = records(job), agents(job)
    job.process.kill()
    agent.kill()
    job.process.communicate()
    assert job.survivors(wait=SECONDS) == [] and not folder.exists()


def test_a_rank_is_killed(tmp_path: Path) -> None:
    job = started(tmp_path)
    ranks(job)[1].kill()
    status, _, err = job.finish(timeout=SECONDS)
    assert status == 128 + signal.SIGKILL and "rank 1 of 2" in err and "was ended by SIGKILL" in err


def test_the_first_failure_is_told_and_not_those_that_follow(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
pathlib.Path("ready" + rank).touch()
while not all(pathlib.Path(f"ready{other}").exists() for other in range(4)):
    time.sleep(0.01)
if rank == "2":
    print("the cause", flush=True)
    os._exit(7)
time.sleep(3)
os._exit(30)
"""
    variables = fakes.install(tmp_path / "bin", "ssh", fakes.SSH)
    options = ("--hosts", "a:2,b:2", "--transport", "ssh", "--no-preflight")
    status, _, err = Job(tmp_path, source, *options, variables=variables).finish()
    assert status == 7
    assert "rank 2 of 4 (host b, process " in err and "┌─ host b, rank 2 ─" in err and "│ the cause" in err
    assert err.count("failed with exit status") == 1


def test_a_command_that_cannot_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    status, _, err = Job(tmp_path, "", "--nproc", "1", "--log-dir", "folder/logs").finish()
    assert status == 1
    assert "the ranks cannot be started: " in err and "folder/logs" in err and "must exist on every host" in err


MISSES_RANK_1 = """
import os, sys, time
time.sleep(2 * (os.environ["RANK"] == "0"))
sys.exit(os.environ["RANK"] == "0")
"""


def test_a_rank_that_ended_before_another_failed_is_told(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, MISSES_RANK_1, "--nproc", "2").finish()
    assert status == 1
    assert "failed with exit status 1. rank 1 had ended before with exit status 0: if rank 0 still trained, " in err
