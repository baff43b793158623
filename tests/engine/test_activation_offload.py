"""activation_checkpointing.offload gives the numbers of the run without it, and keeps to its budget."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.offload import ActivationOffload
from tests.kit.models import TinyGPT, tiny_gpt, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, share_of, train_all


def offloaded(case: Case, folder: Path, every: int, **section: Any) -> Case:
    offload = {"device": "nvme", "nvme_path": str(folder), "min_bytes": 1024, **section}
    return case.at(case.stage, config={"activation_checkpointing": {"every": every, "offload": offload}})


@pytest.mark.parametrize(("world_size", "every", "stages"), [(1, 1, [3]), (2, 0, [0]), (2, 1, [3])])
def test_it_is_bitwise_the_run_without(
    ranks: RankPool, tmp_path: Path, world_size: int, every: int, stages: list[int]
) -> None:
    config = {"activation_checkpointing": {"every": every}}
    plain = Case(partial(TinyGPT, layers=2), token_batch, accumulation=2, steps=2, clip=0.5, config=config)
    for stage in stages:
        case = plain.at(stage)
        budgets: tuple[dict[str, Any], ...] = ({}, {"budget_bytes": 4096})
        cases = [case, *(offloaded(case, tmp_path, every, **budget) for budget in budgets)]
        expected, *outcomes = ranks(world_size, train_all, cases)[0]
        for outcome in outcomes:
            assert outcome.differences(expected) == []


def peak_of_saved(config: dict[str, Any]) -> tuple[int, int]:
    """(highest bytes of saved activations in memory, bytes that were moved) of three steps."""
    torch.manual_seed(0)
    engine = lowtide.initialize(TinyGPT(width=64, layers=8), config)
    for step in range(3):
        engine.train_step(share_of(token_batch(step, 8 * engine.world_size)))
    offload = engine._parts.activations
    assert isinstance(offload, ActivationOffload)
    found = offload.peak_resident_bytes, offload.offloaded_bytes
    engine.close()
    return found


def test_the_peak_stays_under_the_budget(ranks: RankPool, tmp_path: Path) -> None:
    budget = 256 << 10
    config = {
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {
            "offload": {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1024, "budget_bytes": budget}
        },
    }
    for peak, moved in ranks(2, peak_of_saved, config):
        assert 0 < peak <= budget
        assert moved > 4 * budget


def test_the_cpu_as_a_place_says_that_nothing_moves(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = Case(tiny_gpt, token_batch, config={"activation_checkpointing": {"offload": {"device": "cpu"}}})
    plain, moved = train_all([case.at(0, config={"activation_checkpointing": {}}), case])
    assert moved.differences(plain) == []
