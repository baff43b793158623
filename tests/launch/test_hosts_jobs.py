"""Jobs on hosts with networks of their own: where ranks run, what keeps them from starting, and training over two."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ranks import RankPool
from tests.launch.jobs import HostsJob
from tests.launch.network import Network

TWO_BY_TWO = ("--hosts", "n1:2,n2:2")
WORDS = "two  words and a\nline"

# Each rank leaves what it was given in a file, as JSON.
TELL = """
import json, os, pathlib, platform, subprocess, sys, time
told = {**os.environ, "host": platform.node(), "folder": os.getcwd(), "stdin": os.read(0, 10).decode()}
written = pathlib.Path(f"written{os.environ['RANK']}")
written.write_text(json.dumps(told))
written.rename(f"told{os.environ['RANK']}")
print("rank", os.environ["RANK"], "was here")
if "--stay" in sys.argv:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
"""


def told(folder: Path) -> list[dict[str, str]]:
    """What each of four ranks has said, which all ran where they belong, and got what they were given."""
    found = [json.loads((folder / f"told{rank}").read_text(encoding="utf-8")) for rank in range(4)]
    for rank, values in enumerate(found):
        expected = {
            "host": f"n{rank // 2 + 1}",
            "LOCAL_RANK": str(rank % 2),
            "GROUP_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "WORDS": WORDS,
        }
        assert {name: values[name] for name in expected} == expected
    return found


def test_ranks_run_where_they_are_told_to_and_know_each_other(hosts: Network, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = (*TWO_BY_TWO, "--env", f"WORDS={WORDS}", "--log-dir", str(logs))
    with hosts["n1"].small_disk(logs), hosts["n2"].small_disk(logs):  # each keeps the files of its own ranks
        result = HostsJob(hosts, tmp_path, TELL, *options).end()
        assert result.status == 0, result
        assert hosts["n1"].run("ls", str(logs)).split() == ["rank0.log", "rank1.log"]
        assert hosts["n2"].run("ls", str(logs)).split() == ["rank2.log", "rank3.log"]
        assert hosts["n2"].run("cat", str(logs / "rank3.log")) == "rank 3 was here\n"
    assert list(logs.iterdir()) == []
    found = told(tmp_path)
    assert {(rank["folder"], rank["stdin"]) for rank in found} == {(str(tmp_path), "")}
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in found}) == 1
    assert {rank["GLOO_SOCKET_IFNAME"] for rank in found} == {"eth0"}  # not that of 127.0.1.1, and not docker0


# -- pods that find each other --------------------------------------------------------------------------------------


def pods(hosts: Network, folder: Path, *arguments: str) -> list[HostsJob]:
    """`lowtide launch` in each of two pods of a PyTorchJob."""
    common = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "WORDS": WORDS,
    }
    jobs = []
    for index, name in enumerate(("train-master-0", "train-worker-0")):
        variables = {**common, "HOSTNAME": name, "RANK": str(index), "PET_NODE_RANK": str(index)}
        jobs.append(HostsJob(hosts, folder, TELL, at=f"n{index + 1}", arguments=arguments, variables=variables))
    return jobs


@pytest.mark.parametrize("lost", [0, 1])
def test_pods_find_each_other_and_the_loss_of_one_ends_the_others(hosts: Network, tmp_path: Path, lost: int) -> None:
    jobs = pods(hosts, tmp_path, "--stay")
    jobs[0].wait_for_files(*(f"told{rank}" for rank in range(4)))
    told(tmp_path)
    jobs[lost].launcher.kill()
    jobs[0].wait_until_gone(5.0)
    results = [job.end() for job in jobs]
    assert results[lost].status == 128 + signal.SIGKILL and results[1 - lost].status != 0
    assert lost == 0 or "lost host" in results[0].err


# -- what keeps a job from starting: each is noticed in time, told with the host's name, and nothing is started -------


Setting = Callable[[Network], contextlib.AbstractContextManager[Any]]
NO_KNOWN: Setting = lambda hosts: hosts["login"].home_file(".ssh/known_hosts", "")  # noqa: E731
NO_PYTHON: Setting = lambda hosts: hosts["n2"].small_disk(Path(sys.prefix))  # noqa: E731


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (NO_KNOWN, ["n2", "Host key verification failed"]),
        (NO_PYTHON, ["n2", "No such file or directory", sys.executable]),
    ],
    ids=["unknown_key", "no_python"],
)
def test_a_host_that_cannot_be_used_is_named_with_what_ssh_says(
    hosts: Network, tmp_path: Path, setting: Setting, words: list[str]
) -> None:
    with setting(hosts):
        job = HostsJob(hosts, tmp_path, "import pathlib; pathlib.Path('started').touch()", *TWO_BY_TWO)
        result = job.end(25)
        job.wait_until_gone(30.0)
    assert result.status != 0 and all(word in result.err for word in words), result
    assert not (tmp_path / "started").exists()


# -- training: the losses of one host, until a line is cut in the middle of it ----------------------------------------

NOTICED_SECONDS = 8.0  # after 4 to 5 s of silence, and what two busy cores need to end processes with torch in them
NUM_LOSSES = 3
TRAINS = f"""
import pathlib
import time
import torch
import lowtide

torch.manual_seed(0)
config = {{"zero_optimization": {{"stage": 3}}, "optimizer": {{"type": "adamw"}}, "steps_per_print": 0}}
model = torch.nn.Sequential(*[torch.nn.Linear(13, 13) for _ in range(3)])
with lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
    while engine.global_step < STEPS:
        loss = engine.train_step(torch.arange(13.0)[None] * (1 + engine.rank)).loss.item()
        if engine.rank == 0 and engine.global_step <= {NUM_LOSSES}:
            with open("losses", "a") as file:
                print(loss.hex(), file=file)
        if engine.global_step == {NUM_LOSSES}:
            pathlib.Path(f"trained{{engine.rank}}").touch()
        elif engine.global_step > {NUM_LOSSES}:
            time.sleep(0.05)  # the steps until the line is cut need not keep the cores busy
"""


def train_here(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    exec(TRAINS, {"STEPS": NUM_LOSSES})


def test_two_hosts_train_as_one_of_three_ranks_until_the_line_is_cut(
    hosts: Network, ranks: RankPool, tmp_path: Path
) -> None:
    ranks(3, train_here, tmp_path / "one", process_group=False)  # a sum of two has one order
    endless = f"STEPS = 1 << 30\n{TRAINS}"
    job = HostsJob(hosts, tmp_path, endless, "--hosts", "n1:2,n2:1", variables={"OMP_NUM_THREADS": "1"})
    job.wait_for_files("trained0", "trained1", "trained2")
    hosts["n2"].cut()
    job.wait_until_gone(NOTICED_SECONDS)
    result = job.end()
    assert result.status == 1
    assert "lost host n2: nothing was heard from it for 4 s" in result.err
    one, two = ((folder / "losses").read_text().split() for folder in (tmp_path / "one", tmp_path))
    assert one == two and len(set(one)) == NUM_LOSSES  # to the last bit, by other routes
