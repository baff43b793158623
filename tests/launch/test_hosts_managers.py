"""Jobs whose hosts a resource manager names: those of LSF, and pods that find each other."""

import json
import signal
import sys
from pathlib import Path

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
NAMES = tuple(f"told{rank}" for rank in range(4))


def check_places(folder: Path) -> None:
    """That every rank ran where it belongs, and got what it was given."""
    for rank in range(4):
        told = json.loads((folder / f"told{rank}").read_text(encoding="utf-8"))
        assert (told["host"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (f"n{rank // 2 + 1}", str(rank % 2), "4")
        assert told["WORDS"] == WORDS


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
