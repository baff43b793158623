"""A recorded step on a device: what its allocator counts is what the report says."""

import pytest
import torch

import lowtide
from tests.kit import models
from tests.kit.ranks import on_device
from tests.kit.training import ADAMW
from tests.pretend.group import register

ROWS = 8


@on_device(2)
def test_a_recorded_step_has_the_peak_of_the_allocator() -> None:
    register()
    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3}, "optimizer": ADAMW}
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
        assert report.peak_bytes == pytest.approx(report.allocator_bytes, rel=0.1) and before, vars(report)
        assert any(moment.startswith("backward of blocks.0") for moment, _ in report.samples)
