"""Jobs that a resource manager starts: srun and mpirun that really run on several hosts, pods that find each other."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.launch import fake_starter
from tests.launch.hosts_job import HostsJob
from tests.launch.network import Network

WAIT = """
import json, os, pathlib, platform, subprocess, sys, time
rank = os.environ["RANK"]
told = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "WORDS")}
pathlib.Path(f"told{rank}").write_text(json.dumps({**told, "host": platform.node()}))
if "--stay" in sys.argv:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
"""
WORDS = "two  words and a\nline"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TEST_NODES": "n1,n2",
}
STARTERS = {"srun": [], "openmpi": ["--transport", "mpirun", "--hosts", "n1:2,n2:2"]}
STARTERS["hydra"] = STARTERS["openmpi"]
NAMES = tuple(f"told{rank}" for rank in range(4))


def start(hosts: Network, folder: Path, kind: str, *arguments: str) -> HostsJob:
    """A job in a batch script on n1, the first host of the job."""
    path = fake_starter.install(kind, folder / "bin")
    environment = {"PATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", **(SLURM if kind == "srun" else {})}
    options = [*STARTERS[kind], "--env", f"WORDS={WORDS}"]
    return HostsJob(hosts, folder, WAIT, *options, at="n1", arguments=arguments, environment=environment)


def check_places(folder: Path) -> None:
    """That every rank ran where it belongs, and got what it was given."""
    for rank in range(4):
        told = json.loads((folder / f"told{rank}").read_text(encoding="utf-8"))
        assert (told["host"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (f"n{rank // 2 + 1}", str(rank % 2), "4")
        assert told["WORDS"] == WORDS


@pytest.mark.parametrize("starter", list(STARTERS))
def test_a_job_starts_through_it(hosts: Network, tmp_path: Path, starter: str) -> None:
    job = start(hosts, tmp_path, starter)
    result = job.finish()
    assert result.status == 0, result
    check_places(tmp_path)
    job.wait_until_gone(1.0)


@pytest.mark.parametrize("starter", ["srun", "openmpi"])
def test_a_killed_launcher_leaves_nothing(hosts: Network, tmp_path: Path, starter: str) -> None:
    job = start(hosts, tmp_path, starter, "--stay")
    job.wait_for_files(*NAMES)
    job.send(signal.SIGKILL)
    job.wait_until_gone(5.0)
    assert job.finish().status == 128 + signal.SIGKILL


@pytest.mark.parametrize("starter", ["srun", "openmpi"])
def test_a_killed_rank_ends_all(hosts: Network, tmp_path: Path, starter: str) -> None:
    job = start(hosts, tmp_path, starter, "--stay")
    job.wait_for_files(*NAMES)
    job.rank_process(3).kill()
    job.wait_until_gone(5.0)
    result = job.finish()
    assert result.status == 128 + signal.SIGKILL and "rank 3 of 4 (host n2" in result.err


def test_a_starter_that_fails_is_quoted(hosts: Network, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    path = fake_starter.install("srun", folder)
    (folder / "srun").write_text("#!/bin/sh\necho 'srun: error: Invalid account' >&2\nexit 3\n")
    environment = {"PATH": path, **SLURM}
    job = HostsJob(hosts, tmp_path, WAIT, at="n1", environment=environment)
    result = job.finish(20)
    assert result.status != 0 and "srun: error: Invalid account" in result.err and "exit status 3" in result.err


def test_hosts_of_lsf_are_reached_by_ssh(hosts: Network, tmp_path: Path) -> None:
    environment = {"LSB_JOBID": "4711", "LSB_MCPU_HOSTS": "n1 16 n2 16"}
    options = ["--nproc", "2", "--env", f"WORDS={WORDS}"]
    result = HostsJob(hosts, tmp_path, WAIT, *options, at="n1", environment=environment).finish()
    assert result.status == 0, result
    check_places(tmp_path)


def pods(hosts: Network, folder: Path, *arguments: str, port: int = 23456) -> list[HostsJob]:
    """`lowtide launch` in each of two pods of a PyTorchJob."""
    jobs = []
    for index, name in enumerate(("n1", "n2")):
        environment = {
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "HOSTNAME": "train-master-0" if index == 0 else "train-worker-0",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": str(index),
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": "2",
            "WORDS": WORDS,
        }
        jobs.append(HostsJob(hosts, folder, WAIT, at=name, arguments=arguments, environment=environment))
    return jobs


def test_pods_find_each_other(hosts: Network, tmp_path: Path) -> None:
    first, second = pods(hosts, tmp_path)
    results = [first.finish(), second.finish()]
    assert [result.status for result in results] == [0, 0], results
    check_places(tmp_path)


def test_the_loss_of_a_pod_ends_the_others(hosts: Network, tmp_path: Path) -> None:
    first, second = pods(hosts, tmp_path, "--stay")
    first.wait_for_files(*NAMES)
    second.send(signal.SIGKILL)
    first.wait_until_gone(5.0)
    assert second.finish().status == 128 + signal.SIGKILL
    result = first.finish()
    assert result.status == 1 and "lost host" in result.err


def test_the_loss_of_the_first_pod_ends_the_others(hosts: Network, tmp_path: Path) -> None:
    first, second = pods(hosts, tmp_path, "--stay")
    first.wait_for_files(*NAMES)
    first.send(signal.SIGKILL)
    first.wait_until_gone(5.0)
    assert first.finish().status == 128 + signal.SIGKILL and second.finish().status != 0


def test_a_pod_whose_port_is_taken_says_so(hosts: Network, tmp_path: Path) -> None:
    listen = "import socket, sys; s = socket.create_server(('', 23456)); print(flush=True); sys.stdin.read()"
    with hosts["n1"].popen([sys.executable, "-c", listen], stdin=-1, stdout=-1) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdout.readline()
        first, second = pods(hosts, tmp_path)
        result = first.finish()
        assert result.status != 0 and "port 23456" in result.err
        second.send(signal.SIGTERM)
        second.finish()
        owner.stdin.close()
