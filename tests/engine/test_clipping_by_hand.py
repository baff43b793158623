"""`engine.clip_grad_norm_` clips the coming step as torch's does, or says why it cannot."""

import math
from typing import Any

import pytest
import torch

import lowtide
from lowtide import Engine
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, share_of, train

CASE = Case(models.short_gpt, models.token_batch, config={"zero_optimization": {}})
ON_CPU = {"device": "cpu"}
MODES: dict[str, dict[str, Any]] = {
    "after the norm": {},
    "speculative": {"offload_optimizer": {**ON_CPU, "overlap": "speculative"}},
    "delayed": {"offload_optimizer": {**ON_CPU, "overlap": "delayed", "delay_after_steps": 1}},
}


def clip_by_hand(cases: list[Case], max_norm: float) -> list[Outcome]:
    outcomes = []
    for case in cases:
        torch.manual_seed(0)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            outcome = Outcome()
            for step in range(case.steps):
                loss = engine(*share_of(case.global_batch(step, engine.data_size)))
                engine.backward(loss)
                norm = engine.clip_grad_norm_(max_norm)
                result = engine.step()
                outcome.losses.append(result.loss.item())
                outcome.norms.append(norm.item())
                outcome.lrs.append(result.lr)
                assert norm == result.grad_norm or result.skipped
            outcome.state = engine.state_dict()
            outcomes.append(outcome)
    return outcomes


def clip_by_config(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("mode", MODES)
def test_it_is_what_the_config_does(ranks: RankPool, mode: str) -> None:
    """Which is compared with torch elsewhere; the factor is torch's own."""
    cases = [CASE.at(stage, config={"zero_optimization": MODES[mode]}) for stage in (0, 3)]
    expected = ranks(2, clip_by_config, [case.at(case.stage, clip=0.3) for case in cases])[0]
    for found, other in zip(ranks(2, clip_by_hand, cases, 0.3)[0], expected, strict=True):
        assert found.differences(other) == []


def make_engine(**config: Any) -> Engine:
    torch.manual_seed(0)
    return lowtide.initialize(models.mlp(), {**CASE.as_config(), **config})


def backward(engine: Engine, step: int = 0) -> None:
    engine.backward(engine(*models.vector_batch(step, 2)))


def largest_and_rest(stages: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """The largest element by `clip_grad_norm_`, by the gradients themselves, and the norm of the step."""
    found = []
    for stage in stages:
        with make_engine(zero_optimization={"stage": stage}) as engine:
            backward(engine, engine.rank)
            gradients = [engine.gradient(name) for name, _ in engine.named_parameters()]
            largest = max(gradient.abs().max().item() for gradient in gradients if gradient is not None)
            norm = engine.clip_grad_norm_(0.0, norm_type=math.inf).item()
            before = engine.full("last.bias")
            engine.step()
            assert stage == 0 or torch.isfinite(engine.full("last.bias") - before).all()
            found.append((norm, largest, engine.full("last.bias", "exp_avg").abs().max().item()))
    return found


def test_the_largest_element_and_a_norm_of_zero(ranks: RankPool) -> None:
    for norm, largest, momentum in ranks(2, largest_and_rest, (0, 2, 3))[0]:
        assert norm == pytest.approx(largest, rel=1e-6) and momentum == 0.0


def test_float16_shows_gradients_without_the_scale() -> None:
    with make_engine(fp16={"enabled": True, "initial_scale_power": 10}) as engine:
        backward(engine)
        names = [name for name, _ in engine.named_parameters()]
        gradients = [engine.gradient(name) for name in names]
        total = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None]).norm()
        norm = engine.clip_grad_norm_(math.inf)
        assert total.dtype == torch.float32 and 0.01 < total < 100
        torch.testing.assert_close(norm, total, rtol=1e-3, atol=0)
        engine.step()


def test_the_config_may_clip_and_the_norm_be_asked_for() -> None:
    with make_engine(gradient_clipping=0.25) as engine:
        backward(engine)
        assert engine.clip_grad_norm_(math.inf) == engine.clip_grad_norm_(0.25)
        words = r"found max_norm 1 \(norm_type 2\) and gradient_clipping 0.25 in the config, which clips each step"
        with pytest.raises(ValueError, match=words):
            engine.clip_grad_norm_(1.0)
        engine.step()


def test_a_gradient_that_is_not_finite() -> None:
    with lowtide.initialize(models.Explodes(), CASE.as_config()) as engine:
        engine.module.__dict__["factor"] = 2.0
        engine.backward(engine(torch.ones(2, models.FEATURES)))
        assert engine.clip_grad_norm_(1.0).isnan()
        with pytest.raises(RuntimeError, match="expected a finite total norm, found nan: a gradient is not finite"):
            engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
        with pytest.raises(lowtide.NonFiniteGradientError):
            engine.step()


REFUSED: dict[str, tuple[Any, str]] = {
    "3": (lambda engine: engine.clip_grad_norm_(1.0, norm_type=3), "expected a norm_type of 2 or inf, found 3"),
    "-1": (lambda engine: engine.clip_grad_norm_(-1), "expected a max_norm of 0 or more, found -1"),
    "nan": (lambda engine: engine.clip_grad_norm_(math.nan), "expected a max_norm of 0 or more, found nan"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_norm_is_refused(what: str) -> None:
    call, words = REFUSED[what]
    with make_engine() as engine:
        backward(engine)
        with pytest.raises(ValueError, match=rf"engine.clip_grad_norm_\(\): {words}"):
            call(engine)


GRADIENT: dict[str, Any] = {
    "engine.gradient() (safe_get_full_grad in lowtide.deepspeed)": lambda engine: engine.gradient("last.bias"),
}
TIMES: dict[str, Any] = {
    "engine.set_gradient() (safe_set_full_grad in lowtide.deepspeed)": lambda engine: engine.set_gradient(
        "last.bias", torch.zeros(3)
    ),
    "engine.clip_grad_norm_()": lambda engine: engine.clip_grad_norm_(1.0),
}


@pytest.mark.parametrize("what", TIMES)
def test_only_between_the_last_backward_and_the_step(what: str) -> None:
    with make_engine(gradient_accumulation_steps=2) as engine:
        for count in (0, 1):
            with pytest.raises(StateError) as caught:
                TIMES[what](engine)
            assert str(caught.value) == (
                f"{what}: expected the gradients of a whole step, found {count} of 2 microbatches done "
                "(gradient_accumulation_steps); call it between the last backward and engine.step()"
            )
            backward(engine)
            engine.step()


@pytest.mark.parametrize("what", GRADIENT)
def test_a_gradient_is_there_after_a_backward(what: str) -> None:
    with make_engine(gradient_accumulation_steps=2) as engine:
        for _ in range(2):
            with pytest.raises(StateError) as caught:
                GRADIENT[what](engine)
            assert str(caught.value) == (
                f"{what}: expected a backward since the last step, found 0 of 2 microbatches done "
                "(gradient_accumulation_steps); call it between a backward and engine.step()"
            )
            for _ in range(2):
                backward(engine)
                assert GRADIENT[what](engine).any()
                engine.step()


@pytest.mark.parametrize("what", TIMES | GRADIENT)
def test_an_update_in_the_backward_leaves_no_gradients(what: str) -> None:
    with make_engine(zero_optimization={"stage": 2, "update_in_backward": True}) as engine:
        backward(engine)
        norm = engine.clip_grad_norm_(math.inf)
        with pytest.raises(StateError, match="expected update_in_backward false in zero_optimization, found it true: "):
            (TIMES | GRADIENT)[what](engine)
        assert engine.step().grad_norm == norm


def test_a_backward_after_it_would_not_be_clipped() -> None:
    with make_engine() as engine:
        backward(engine)
        engine.clip_grad_norm_(1.0)
        loss = engine(*models.vector_batch(0, 2))
        words = r"backward: expected engine.step\(\) after engine.clip_grad_norm_\(\), found another backward, whose gr"
        with pytest.raises(StateError, match=words):
            engine.backward(loss)
        assert engine.step().loss.isfinite()
