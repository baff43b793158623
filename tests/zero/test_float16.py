"""float16 is plain torch with the same casts and loss scales; what an overflow does, and how the scale goes on."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.zero.loss_scale import LossScaleError, LossScaler
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal, settings, train_all
from tests.zero.delayed_update import Dtypes, train_mixed


def overflowing_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """In step 1 the last row has a target whose gradient is beyond float16 at a loss scale of 8."""
    x, y = models.vector_batch(step, rows)
    if step == 1:
        y[-1] = 60000.0
    return x, y


MLP = Case(models.mlp, overflowing_batch)
GPT = Case(models.short_gpt, models.token_batch)
GROWING = {"initial_scale_power": 3, "loss_scale_window": 2}


@pytest.mark.parametrize(
    ("case", "fp16", "overflows", "scales"),
    [
        (GPT.at(0, clip=0.3, accumulation=2), {"loss_scale": 256.0}, "...", [256] * 3),
        (MLP, {"loss_scale": 8.0}, ".x.", [8] * 3),
        (MLP.at(0, steps=6), {**GROWING, "hysteresis": 1}, ".x....", [8, 8, 4, 4, 8, 8]),
    ],
    ids=["static", "overflow", "growing"],
)
def test_it_equals_plain_torch(
    ranks: RankPool, case: Case, fp16: dict[str, Any], overflows: str, scales: list[float]
) -> None:
    expected = train_mixed(case, 2, Dtypes(torch.float16), lambda skipped: scales[len(skipped)])
    kept = [step for step, overflow in enumerate(overflows) if overflow == "."]
    assert [step for step, skipped in enumerate(expected.skipped) if not skipped] == kept
    cases = [case.at(stage, config={"fp16": {"enabled": True, **fp16}}) for stage in (0, 3)]
    for outcome in ranks(2, train_all, cases)[0]:
        assert outcome.skipped == expected.skipped and outcome.scales == scales
        for ours, theirs in ((outcome.losses, expected.losses), (outcome.norms, expected.norms)):
            torch.testing.assert_close([ours[i] for i in kept], [theirs[i] for i in kept], rtol=2e-3, atol=0)
        for name, value in expected.state.items():
            assert outcome.state[name].dtype == torch.float16
            torch.testing.assert_close(outcome.state[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "overflows", "scales"),
    [
        ({"scale": 128.0, "dynamic": False}, "xx..xx..", [128] * 8),
        ({"scale": 4.0, "window": 3}, "......", [4, 4, 8, 8, 8, 16]),
        ({"scale": 4.0, "window": 3, "hysteresis": 1}, "..x...", [4, 4, 2, 2, 2, 4]),  # the window begins again
        ({"scale": 64.0, "hysteresis": 3}, "xxxx", [64, 64, 32, 16]),
        ({"scale": 64.0, "hysteresis": 2}, "x.x.x", [64, 64, 32, 32, 16]),  # good steps do not refill it
        ({"scale": 64.0, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [64, 64, 64, 64, 64, 32]),
        ({"scale": 8.0, "window": 2, "hysteresis": 2}, "x..xx", [8, 8, 16, 16, 8]),  # doubling does
    ],
)
def test_the_loss_scale_after_each_step(options: dict[str, Any], overflows: str, scales: list[float]) -> None:
    scaler, found = LossScaler(**{"dynamic": True, **options}), []
    for overflow in overflows:
        scaler.update(overflow == "x")
        found.append(scaler.scale)
    assert found == scales


def test_the_scale_stops_at_its_minimum_and_then_raises() -> None:
    scaler = LossScaler(3.0, dynamic=True, hysteresis=1, minimum=2.0)
    scaler.update(True)
    assert scaler.scale == 2.0
    text = refusal(scaler.update, True, kind=LossScaleError)
    assert "smallest loss scale (2, fp16.min_loss_scale)" in text and "bf16" in text


def test_the_graph_of_a_step_goes_with_it() -> None:
    """What a forward has returned is in no cycle, which would hold its graph until Python looks for some."""
    gc.disable()
    try:
        with lowtide.initialize(models.tiny_gpt(), settings(fp16={"enabled": True})) as engine:
            loss = engine(*models.token_batch(0, 2))
            output = weakref.ref(loss)
            engine.backward(loss)
            engine.step()
            del loss
            assert output() is None
    finally:
        gc.enable()
