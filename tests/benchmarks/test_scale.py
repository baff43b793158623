"""What a rank's host does, in a job of 8 and of 16,384 ranks, and in a pipeline of many stages."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.fast_simulation import FastSimulation
from lowtide.pipe.schedules.registry import make_schedule
from tests.kit.ranks import in_a_new_process

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def status_of(arguments: list[str]) -> int:
    sys.path.insert(0, str(SCRIPT.parent))
    status: int = runpy.run_path(str(SCRIPT))["main"](arguments)
    return status


@pytest.mark.parametrize(("ranks", "blocks"), [(16384, 1), (512, 3)])  # whose counters are more words among more ranks
def test_many_ranks_are_as_much_work_as_8(ranks: int, blocks: int, tmp_path: Path) -> None:
    record = tmp_path / "scale.json"
    arguments = ["--ranks", "8", str(ranks), "--rounds", "1", "--blocks", str(blocks)]
    assert in_a_new_process(status_of, [*arguments, "--json", str(record)]) == 0
    small, large = (one["timed"]["0"]["more"] for one in json.loads(record.read_text())["contenders"])
    assert large["initialize_work"] < 1.2 * small["initialize_work"]
    assert large["step_work"] == pytest.approx(small["step_work"], rel=0.01)
    assert large["order"] == small["order"] and large["collectives"] == small["collectives"] > 0
    assert large["sent_bytes"] * 7 / 8 == pytest.approx(small["sent_bytes"] * (ranks - 1) / ranks, rel=0.01)


def test_a_pipeline_of_128_stages_has_the_bubble_of_the_closed_form() -> None:
    p, m = 128, 96
    simulation = FastSimulation(make_schedule("1f1b", p, m))
    makespan, busy = simulation.outcome(Costs.uniform(p))
    assert 1 - sum(busy) / (p * makespan) == pytest.approx((p - 1) / (m + p - 1))
    assert [phases.held.max() + 1 for phases in simulation.computing] == [min(m, p - rank) for rank in range(p)]
