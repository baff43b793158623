"""The loss scale: how it grows, and how it backs off."""

import pytest

from lowtide.zero.loss_scale import LossScaleError, LossScaler


def scales(scaler: LossScaler, outcomes: str) -> list[float]:
    """The scale after each step; `.` for a good step, `x` for an overflow."""
    found = []
    for outcome in outcomes:
        scaler.update(outcome == "x")
        found.append(scaler.scale)
    return found


def test_a_static_scale_never_changes() -> None:
    assert scales(LossScaler(scale=128.0), "xx..xx..") == [128.0] * 8


def test_the_scale_doubles_after_a_window_of_good_steps() -> None:
    assert scales(LossScaler(4.0, dynamic=True, window=3), "......") == [4, 4, 8, 8, 8, 16]


def test_an_overflow_starts_the_window_again() -> None:
    scaler = LossScaler(4.0, dynamic=True, window=3, hysteresis=1)
    assert scales(scaler, "..x...") == [4, 4, 2, 2, 2, 4]


def test_the_scale_halves_when_the_hysteresis_is_used_up() -> None:
    assert scales(LossScaler(64.0, dynamic=True, hysteresis=3), "xxxx") == [64, 64, 32, 16]


def test_good_steps_do_not_refill_the_hysteresis() -> None:
    assert scales(LossScaler(64.0, dynamic=True, hysteresis=2), "x.x.x") == [64, 64, 32, 32, 16]


def test_good_steps_refill_the_hysteresis_where_that_is_asked_for() -> None:
    scaler = LossScaler(64.0, dynamic=True, hysteresis=2, consecutive_hysteresis=True)
    assert scales(scaler, "x.x.xx") == [64, 64, 64, 64, 64, 32]


def test_doubling_refills_the_hysteresis() -> None:
    assert scales(LossScaler(8.0, dynamic=True, window=2, hysteresis=2), "x..xx") == [8, 8, 16, 16, 8]


def test_the_scale_stops_at_its_minimum_and_then_raises() -> None:
    scaler = LossScaler(3.0, dynamic=True, hysteresis=1, minimum=2.0)
    assert scales(scaler, "x") == [2.0]
    with pytest.raises(LossScaleError) as error:
        scaler.update(True)
    assert "smallest loss scale (2, fp16.min_loss_scale)" in str(error.value) and "bf16" in str(error.value)
