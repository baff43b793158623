"""A recorded step on a device: what its allocator counts is what the report says."""

from typing import Any

import pytest
import torch

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW
from tests.pretend.group import register

ROWS = 8


def recorded(stage: int) -> tuple[int, int, dict[str, Any]]:
    """(peak of the report, of the allocator, the report)."""
    register()
    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": stage}, "optimizer": ADAMW}
    with lowtide.initialize(
        models.TinyGPT(width=64, layers=3), {**config, "steps_per_print": 0, "device": "pretend"}
    ) as engine:
        for number in range(2):
            engine.train_step(models.token_batch(number, ROWS))
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        with engine.record_memory():
            engine.train_step(models.token_batch(2, ROWS))
        report = engine.memory_report()
        assert report.peak_bytes is not None and report.allocator_bytes is not None and before
        return report.peak_bytes, report.allocator_bytes, vars(report)


def test_a_recorded_step_has_the_peak_of_the_allocator(pretend_ranks: RankPool) -> None:
    for peak, allocated, report in pretend_ranks(2, recorded, 3, process_group=False):
        assert peak == pytest.approx(allocated, rel=0.1), report
        assert any(moment.startswith("backward of blocks.0") for moment, _ in report["samples"])
