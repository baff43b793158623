"""A memory report shows what the planner predicts beside what a step held."""

from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.engine.report.memory_report import MemoryReport
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW
from tests.plan.test_planned_peak import ROWS, TOLERANCE, batch_of, config_of, gpt

PLAIN = {"optimizer": ADAMW, "steps_per_print": 0}


def recorded(folder: str, stage: int, transport: str) -> dict[str, Any]:
    """What the rank has saved in the third step."""
    report = {"memory_report": {"folder": folder}, "communication": {"transport": transport}}
    with lowtide.initialize(gpt(), {**config_of(stage, 0, 1), **report}) as engine:
        for number in range(3):
            engine.train_step(batch_of("gpt", number))
        rank = engine.rank
    return vars(MemoryReport.load(Path(folder) / f"memory-rank{rank}.json"))


@pytest.mark.parametrize(("stage", "transport"), [(0, "sockets"), (3, "sockets"), (2, "shared_memory"), (3, "native")])
def test_what_a_step_holds_is_what_was_predicted(stage: int, transport: str, ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, recorded, str(tmp_path), stage, transport):
        assert found["predicted_peak_bytes"] == pytest.approx(found["peak_bytes"], rel=TOLERANCE)
        for kind in ("optimizer_bytes", "buffer_bytes"):
            assert found["measured"][kind] == found["predicted"][kind], kind
        for kind in ("parameter_bytes", "activation_bytes"):
            assert found["measured"][kind] == pytest.approx(found["predicted"][kind], rel=TOLERANCE), kind
        assert sum(found["at_peak"].values()) == found["peak_bytes"]
        others = sum(nbytes for _, nbytes in found["owners"])
        assert others == pytest.approx(found["at_peak"]["activation_bytes"], rel=TOLERANCE)


def test_a_prediction_that_there_is_not_has_a_reason(tmp_path: Path) -> None:
    config = {**PLAIN, "memory_report": {"folder": str(tmp_path), "step": 2}, "tiles": {"loss": 8}}
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for step in range(2):
            engine.train_step(models.token_batch(step, 2))
        assert "the model already has tiles; only `lowtide plan` predicts them" in engine.memory_report().why_not


def test_a_pipeline_is_recorded_on_each_rank(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, of_a_pipeline, str(tmp_path)):
        assert not found.why_not and found.predicted_peak_bytes == pytest.approx(found.peak_bytes, rel=TOLERANCE)
        assert found.measured and found.measured["optimizer_bytes"] == found.predicted["optimizer_bytes"]


def of_a_pipeline(folder: str) -> MemoryReport:
    config = {**config_of(1, 0, 2), "parallel": {"pipeline": 2}, "memory_report": {"folder": folder, "step": 2}}
    with lowtide.initialize(gpt(), config) as engine:
        for number in range(2):
            engine.train_step(models.token_batch(number, 2 * ROWS))
        return MemoryReport.load(Path(folder) / f"memory-rank{engine.rank}.json")
