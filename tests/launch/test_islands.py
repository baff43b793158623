"""Islands of a job: one that is lost leaves the outer ring, and the others train on with the numbers of the oracle."""

import json
from pathlib import Path

import pytest
import torch

from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.plan import HostPlan, RankPlan
from lowtide.launch.hosts.plan import Plan as JobPlan
from lowtide.launch.job.islands import Islands
from tests import models
from tests.engine.outer_training import Plan, by_torch
from tests.launch.jobs import Job
from tests.zero.training import Case

HANG_SECONDS = 150.0
CASE = Case(models.tiny_gpt_float64, models.token_batch, stage=2, clip=0.5, steps=10)
UNITS = [[""], ["blocks.0."], ["blocks.1."], ["blocks.2."]]
# Rank 1 dies when it has sent its values in the exchange after step 8, and has received those of the others: rank 0, of
# the same island, has all that it is to have, as have the ranks 2 and 4. Rank 0 had the store of a job without islands.
TRAINS = f"""
import json, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch
import lowtide
from lowtide.comm.island_links import Links
from tests.engine.outer_training import batch_of
from tests.launch.test_islands import CASE
torch.manual_seed(0)
torch.set_num_threads(1)
swap, steps, swaps = Links.swap, 0, 0

def deadly(links, *arguments):
    global swaps
    swaps += steps == 8
    if swaps == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    swap(links, *arguments)

Links.swap = deadly
with lowtide.initialize(CASE.build(), {{**CASE.as_config(), "outer": json.loads(os.environ["OUTER"])}}) as engine:
    for step in range(CASE.steps):
        steps += 1
        engine.train_step(batch_of(engine, CASE, step))
    state = engine.state_dict()
if engine.rank == 0:
    torch.save(state, f"island{{int(os.environ['RANK']) // 2}}.pt")
"""


def test_islands_train_on_without_one_that_dies_in_the_middle_of_an_exchange(tmp_path: Path) -> None:
    plan = Plan(lost=(0, 8))
    variables = {"OUTER": json.dumps(plan.as_config(2)), "OMP_NUM_THREADS": "1"}
    job = Job(tmp_path, TRAINS, "--nproc", "6", "--islands", "2", variables=variables)
    status, out, err = job.finish(HANG_SECONDS)
    assert status == 0, err
    assert "rank 1 of 6" in err and "island 0 (ranks 0-1) is lost, and the others go on" in err
    said = (
        "outer: exchange 2 goes on without island 0 (island 0: rank 1 was ended by SIGKILL): means are over islands 1, "
        "2 from now on"
    )
    assert said in out, out
    expected = by_torch(CASE, plan, 3, 2, UNITS)
    for island in (1, 2):
        state = torch.load(tmp_path / f"island{island}.pt")
        for name, value in expected[island][1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


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
