"""float16 against plain torch with the same casts and the same loss scale; what an overflow does."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, train_all
from tests.zero.mixed_precision import Dtypes, train_mixed

STAGES = (0, 1, 2, 3)
BAD_STEP = 1


def overflowing_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """In one step the last row has a target whose gradient is beyond float16 at a loss scale of 8."""
    x, y = models.vector_batch(step, rows)
    if step == BAD_STEP:
        y[-1] = 60000.0
    return x, y


def fp16(case: Case, **settings: Any) -> list[Case]:
    return [case.at(stage, config={"fp16": {"enabled": True, **settings}}) for stage in STAGES]


def halving(initial: float, hysteresis: int, window: int) -> Callable[[list[bool]], float]:
    """The loss scale after a history of skipped steps, written out from the rule."""

    def scale_of(skipped: list[bool]) -> float:
        scale, patience, good = initial, hysteresis, 0
        for overflow in skipped:
            good = 0 if overflow else good + 1
            if overflow and patience > 1:
                patience -= 1
            elif overflow:
                scale /= 2
            elif good % window == 0:
                scale, patience = scale * 2, hysteresis
        return scale

    return scale_of


def assert_equals(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.skipped == expected.skipped
    assert outcome.scales == expected.scales
    for name in ("losses", "norms"):
        kept = [i for i, skipped in enumerate(expected.skipped) if not skipped]
        ours, theirs = getattr(outcome, name), getattr(expected, name)
        torch.testing.assert_close([ours[i] for i in kept], [theirs[i] for i in kept], rtol=2e-3, atol=0)
    for name, value in expected.state.items():
        assert outcome.state[name].dtype == torch.float16
        torch.testing.assert_close(outcome.state[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, Case(models.mlp, models.vector_batch)),
        (2, Case(models.short_gpt, models.token_batch, clip=0.3, accumulation=2)),
    ],
)
def test_static_scale_equals_plain_torch(ranks: RankPool, world_size: int, case: Case) -> None:
    expected = train_mixed(case, world_size, Dtypes(torch.float16), lambda skipped: 256.0)
    assert not any(expected.skipped)
    for outcome in ranks(world_size, train_all, fp16(case, loss_scale=256.0))[0]:
        assert_equals(outcome, expected)


def test_an_overflow_skips_the_step_and_a_static_scale_stays(ranks: RankPool) -> None:
    case = Case(models.mlp, overflowing_batch)
    expected = train_mixed(case, 2, Dtypes(torch.float16), lambda skipped: 8.0)
    assert expected.skipped == [False, True, False]
    for outcome in ranks(2, train_all, fp16(case, loss_scale=8.0))[0]:
        assert_equals(outcome, expected)


@pytest.mark.parametrize(("hysteresis", "scales"), [(1, [8, 8, 4, 4, 8, 8]), (2, [8, 8, 8, 8, 16, 16])])
def test_an_overflow_halves_a_dynamic_scale_and_good_steps_double_it(
    ranks: RankPool, hysteresis: int, scales: list[float]
) -> None:
    case = Case(models.mlp, overflowing_batch, steps=6)
    expected = train_mixed(case, 2, Dtypes(torch.float16), halving(8.0, hysteresis, 2))
    assert expected.skipped == [False, True, False, False, False, False]
    assert expected.scales == scales
    settings = {"initial_scale_power": 3, "hysteresis": hysteresis, "loss_scale_window": 2}
    for outcome in ranks(2, train_all, fp16(case, **settings))[0]:
        assert_equals(outcome, expected)


def test_a_scale_that_is_too_large_comes_down_by_itself(ranks: RankPool) -> None:
    case = Case(models.short_gpt, models.token_batch, steps=6)
    expected = train_mixed(case, 2, Dtypes(torch.float16), halving(2.0**18, 2, 1000))
    assert expected.skipped == [True, True, True, True, False, False]
    for outcome in ranks(2, train_all, fp16(case, initial_scale_power=18))[0]:
        assert_equals(outcome, expected)


def test_the_graph_of_a_step_goes_with_it() -> None:
    """What a forward has returned is in no cycle, which would hold its graph until Python looks for some."""
    config = fp16(Case(models.tiny_gpt, models.token_batch))[0].as_config()
    gc.disable()
    try:
        with lowtide.initialize(models.tiny_gpt(), config) as engine:
            loss = engine(*models.token_batch(0, 2))
            output = weakref.ref(loss)
            engine.backward(loss)
            engine.step()
            del loss
            assert output() is None
    finally:
        gc.enable()
