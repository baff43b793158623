"""`engine.memory_report()`: what a step held, when, and who held it."""

import re
from contextlib import nullcontext

import pytest
import torch

import lowtide
from tests.kit import models
from tests.kit.training import settings


def test_a_report_without_a_recording_is_of_now() -> None:
    with lowtide.initialize(models.tiny_gpt(), settings()) as engine:
        engine.train_step(models.token_batch(0, 2))
        report = engine.memory_report()
        assert report.now == vars(engine.memory()) and report.peak_bytes is None
        assert report.predicted["optimizer_bytes"] == engine.memory().optimizer_bytes
        assert "no step was recorded: engine.record_memory()" in report.why_not
        total = {kind: sum(one[kind] for one in report.by_module.values()) for kind in report.now}
        assert total == report.now


def test_a_step_is_recorded_by_hand_and_says_who_held_what() -> None:
    losses = []
    batches = [models.token_batch(step, 16) for step in range(2)]  # activations are more than gradients
    for records in (False, True):
        torch.manual_seed(0)
        with lowtide.initialize(models.tiny_gpt(), settings(train_micro_batch_size_per_gpu=16)) as engine:
            engine.train_step(batches[0])
            with engine.record_memory() if records else nullcontext():
                losses.append(float(engine.train_step(batches[1]).loss))
            report = engine.memory_report()
    assert losses[0] == losses[1]
    assert report.owners and any(name.startswith("forward of blocks.0") for name, _ in report.owners)
    assert re.match(r"(forward|backward)", report.moment)
    moments = [moment for moment, _ in report.samples]
    assert moments.index("forward of blocks.0, microbatch 0") < moments.index("backward of blocks.0, microbatch 0")


def test_a_recording_without_a_step_is_refused() -> None:
    with lowtide.initialize(models.tiny_gpt(), settings()) as engine:
        with (
            pytest.raises(ValueError, match="expected a step during the recording, found none"),
            engine.record_memory(),
        ):
            pass
        with engine.record_memory():
            engine.train_step(models.token_batch(0, 2))
            with pytest.raises(ValueError, match="expected no recording in progress"), engine.record_memory():
                pass
        engine.train_step(models.token_batch(0, 2))
