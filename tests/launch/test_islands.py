"""Islands of a job: one that is lost leaves the outer ring, and the others train on with the numbers of the oracle."""

from pathlib import Path

import pytest
import torch

from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.plan import HostPlan, RankPlan
from lowtide.launch.hosts.plan import Plan as JobPlan
from lowtide.launch.job.islands import Islands
from tests.engine.outer_training import by_torch
from tests.launch.dying_island import CASE, PLAN
from tests.launch.jobs import Job

HANG_SECONDS = 150.0
UNITS = [[""], ["blocks.0."], ["blocks.1."], ["blocks.2."]]
# Rank 1 dies, and the ranks of the other island wait for the end of rank 0, which belongs to it.
LOSES = """
import os, pathlib, signal, time
rank, of_first = os.environ["RANK"], pathlib.Path("pid0")
if rank == "0":
    pathlib.Path("pid").write_text(str(os.getpid()))
    os.replace("pid", of_first)
    signal.pause()
while not of_first.exists():
    time.sleep(0.01)
if rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
while os.path.exists(f"/proc/{of_first.read_text()}"):
    time.sleep(0.01)
"""


def test_islands_train_on_without_one_that_dies_in_the_middle_of_an_exchange(tmp_path: Path) -> None:
    """Rank 0, which dies, has the store of a job without islands."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    source = "from tests.launch.dying_island import train; train()"
    job = Job(tmp_path, source, "--nproc", "3", "--islands", "1", variables=variables)
    status, out, err = job.finish(HANG_SECONDS)
    assert status == 0, err
    assert "rank 0 of 3" in err and "island 0 (rank 0) is lost, and the others go on" in err
    said = (
        "outer: exchange 2 goes on without island 0 (island 0: rank 0 was ended by SIGKILL): means are over islands 1, "
        "2 from now on"
    )
    assert said in out, out
    expected = by_torch(CASE, PLAN, 3, 1, UNITS)
    for island in (1, 2):
        state = torch.load(tmp_path / f"island{island}.pt")
        for name, value in expected[island][1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


def test_ranks_end_with_their_island_and_the_others_go_on(tmp_path: Path) -> None:
    job = Job(tmp_path, LOSES, "--nproc", "4", "--islands", "2")
    status, _, err = job.finish(HANG_SECONDS)
    assert status == 0, err
    assert "rank 1 of 4" in err and "island 0 (ranks 0-1) is lost, and the others go on" in err


def test_a_job_whose_islands_are_all_lost_has_failed(tmp_path: Path) -> None:
    job = Job(tmp_path, "import sys; sys.exit(5)", "--nproc", "2", "--islands", "1")
    status, _, err = job.finish(HANG_SECONDS)
    assert status == 5 and err.count("is lost, and the others go on") == 1, err


def plan_of(*counts: int) -> JobPlan:
    ranks = [tuple(RankPlan(0, 0, None, (), {}) for _ in range(count)) for count in counts]
    hosts = tuple(HostPlan(f"host{index}", index, found) for index, found in enumerate(ranks))
    return JobPlan("", "ssh", hosts, (), "", {})


@pytest.mark.parametrize(
    ("counts", "asked", "text"),
    [
        ((2, 4), "host", "expected as many ranks on each host, found host0 2, host1 4; name slots, or --islands N"),
        ((2, 4), 4, "--islands 4: expected a divisor of the 6 ranks of the job, so that all islands have as many"),
    ],
)
def test_islands_have_one_size(counts: tuple[int, ...], asked: int, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        Islands(plan_of(*counts), asked)


def test_the_last_island_cannot_be_lost() -> None:
    islands = Islands(plan_of(2, 2, 2), "host")
    assert islands.lose({1}) and not islands.lose({0, 2}) and islands.lose({0}) and not islands.lose({2})
    assert [islands.is_lost(island) for island in range(3)] == [True, True, False]
