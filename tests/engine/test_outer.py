"""Islands train as DiLoCo says, at every stage, and every island has the same bits where they have met."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.engine.outer_training import Plan, by_torch, resumed, train_islands
from tests.ranks import RankPool
from tests.zero.training import Case

CASE = Case(models.tiny_gpt_float64, models.token_batch, clip=0.5, steps=9)
UNITS = [[""], ["blocks.0."], ["blocks.1."], ["blocks.2."]]
PLANS = [
    Plan(),
    Plan(optimizer="sgd", momentum=0.0, lr=0.5),
    Plan(optimizer="average", every=3),
    Plan(overlap=2, alpha=0.5),
    Plan(every=6, fragments=3, overlap=1, alpha=0.25),
]


def train_all(cases: list[tuple[Case, dict[str, Any]]]) -> list[Any]:
    return [train_islands(case, outer) for case, outer in cases]


@pytest.mark.parametrize(("num_islands", "size"), [(2, 1), (2, 2), (3, 1)])
def test_islands_train_as_one_process_that_simulates_them(ranks: RankPool, num_islands: int, size: int) -> None:
    stages = (0, 3, 2, 1, 3)
    cases = [(CASE.at(stage), plan.as_config(size)) for stage, plan in zip(stages, PLANS, strict=True)]
    found = ranks(num_islands * size, train_all, cases, process_group=False)
    for index, plan in enumerate(PLANS):
        expected = by_torch(CASE, plan, num_islands, size, UNITS)
        for island, (losses, state) in enumerate(expected):
            own_losses, own = found[island * size][index]
            torch.testing.assert_close(own_losses, losses, rtol=1e-11, atol=1e-11, msg=f"{plan}: {{}}".format)
            for name, value in state.items():
                torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11, msg=f"{plan} {name}: {{}}".format)


def save_and_go_on(cases: list[tuple[Case, dict[str, Any], str, int]]) -> list[Any]:
    return [resumed(*case) for case in cases]


def test_checkpoints_go_on_bit_by_bit_with_an_exchange_under_way_too(ranks: RankPool, tmp_path: Path) -> None:
    streaming = Plan(every=6, fragments=3, overlap=3, alpha=0.25).as_config(2)
    cases = [(CASE.at(3), Plan().as_config(2), str(tmp_path / "plain"), 6)]
    cases += [(CASE.at(1), streaming, str(tmp_path / f"step{step}"), step) for step in (6, 7, 8)]
    ranks(4, save_and_go_on, cases, process_group=False)
