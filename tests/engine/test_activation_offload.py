"""activation_checkpointing.offload gives the numbers of the run without it, and keeps to its budget."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.offload import ActivationOffload
from tests.kit.models import TinyGPT, tiny_gpt, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, settings, share_of, train_all


def offloaded(case: Case, folder: Path, every: int, **section: Any) -> Case:
    offload = {"device": "nvme", "nvme_path": str(folder), "min_bytes": 1024, **section}
    return case.at(case.stage, config={"activation_checkpointing": {"every": every, "offload": offload}})


@pytest.mark.parametrize(("world_size", "every", "stage"), [(1, 1, 3), (2, 0, 0), (2, 1, 3)])
def test_it_is_bitwise_the_run_without(
    ranks: RankPool, tmp_path: Path, world_size: int, every: int, stage: int
) -> None:
    config = {"activation_checkpointing": {"every": every}}
    build = partial(TinyGPT, layers=2)
    case = Case(build, token_batch, stage, accumulation=2, steps=2, clip=0.5, config=config)
    cases = [case, offloaded(case, tmp_path, every), offloaded(case, tmp_path, every, budget_bytes=4096)]
    expected, *outcomes = ranks(world_size, train_all, cases)[0]
    for outcome in outcomes:
        assert outcome.differences(expected) == []


def peak_of_saved(config: dict[str, Any]) -> tuple[int, int]:
    """(highest bytes of saved activations in memory, bytes that were moved) of three steps."""
    with lowtide.initialize(TinyGPT(width=64, layers=8), config) as engine:
        for step in range(3):
            engine.train_step(share_of(token_batch(step, 8 * engine.world_size)))
        offload = engine._parts.activations
        assert isinstance(offload, ActivationOffload)
        return offload.peak_resident_bytes, offload.offloaded_bytes


def test_the_peak_stays_under_the_budget(ranks: RankPool, tmp_path: Path) -> None:
    budget = 256 << 10
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1024, "budget_bytes": budget}
    config = settings(3, train_micro_batch_size_per_gpu=8, activation_checkpointing={"offload": offload})
    for peak, moved in ranks(2, peak_of_saved, config):
        assert 0 < peak <= budget
        assert moved > 4 * budget


def test_the_cpu_as_a_place_changes_nothing() -> None:
    case = Case(tiny_gpt, token_batch, config={"activation_checkpointing": {"offload": {"device": "cpu"}}})
    plain, moved = train_all([case.at(0, config={"activation_checkpointing": {}}), case])
    assert moved.differences(plain) == []
