"""Between backward and step gradients are clipped, set and read as in torch, or an error says why they are not.

That steps are of the gradients that were set is asked in `test_parameter_values.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import Engine
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, assert_alike, refusal, settings, train

GPT = Case(models.short_gpt, models.token_batch)
MODES: dict[str, dict[str, Any]] = {
    "after the norm": {},
    "speculative": {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}},
    "delayed": {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}},
}


def clip(engine: Engine, case: Case, step: int) -> Any:
    engine.backward(engine(*case.share(engine, step)))
    norm = engine.clip_grad_norm_(0.3)
    result = engine.step()
    assert norm == result.grad_norm
    return result


@on_ranks(2)
def test_clipping_by_hand_is_what_the_config_does() -> None:
    """Which is compared with torch elsewhere; the factor is torch's own."""
    for stage, mode in zip((0, 3, 3), MODES.values(), strict=True):
        case = GPT.at(stage, config={"zero_optimization": mode})
        assert_alike([train(case, clip), train(case.at(stage, clip=0.3))], case)


@on_ranks(2)
def test_ranks_that_set_different_kinds() -> None:
    with after_backward() as engine:
        text = refusal(engine.set_gradient, "last.bias", torch.ones(3) if engine.rank else None, kind=Exception)
    assert "expected None for 'last.bias' on all ranks or on none, found both" in text


def backward(engine: Engine, step: int = 0) -> None:
    engine.backward(engine(*models.vector_batch(step, 2)))


def initialize(stage: int = 0, **config: Any) -> Engine:
    """first.bias is frozen."""
    torch.manual_seed(0)
    model = models.mlp()
    model.get_parameter("first.bias").requires_grad_(False)
    return lowtide.initialize(model, settings(stage, **config))


def after_backward(stage: int = 0, **config: Any) -> Engine:
    engine = initialize(stage, **config)
    backward(engine, engine.rank)
    return engine


@on_ranks(2)
def test_the_largest_element_and_a_norm_of_zero() -> None:
    """By the gradients themselves; a norm of zero leaves no momentum."""
    for stage in (0, 2, 3):
        with after_backward(stage) as engine:
            gradients = [engine.gradient(name) for name, _ in engine.named_parameters()]
            largest = max(gradient.abs().max().item() for gradient in gradients if gradient is not None)
            assert engine.clip_grad_norm_(0.0, norm_type=math.inf).item() == pytest.approx(largest, rel=1e-6)
            engine.step()
            assert not engine.full("last.bias", "exp_avg").any()


def test_a_group_without_elements_has_no_largest() -> None:
    model = models.mlp()
    model.register_parameter("none", nn.Parameter(torch.empty(0, dtype=torch.float64)))  # alone, by its dtype
    with lowtide.initialize(model, settings()) as engine:
        backward(engine)
        assert engine.clip_grad_norm_(1.0, norm_type=math.inf) > 0


@pytest.mark.parametrize("later", [(math.inf, 2.0), (0.1, 2.0), (0.02, math.inf)])
def test_a_later_clip_sees_clipped_gradients(later: tuple[float, float]) -> None:
    """As with torch's `clip_grad_norm_`: it does not undo the first."""
    with after_backward() as engine:
        first = engine.clip_grad_norm_(0.3).item()
        gradients = {name: engine.gradient(name) for name, param in engine.named_parameters() if param.requires_grad}
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values() if gradient is not None])
        param = torch.nn.Parameter(torch.zeros_like(flat))
        param.grad = flat * (0.3 / first)
        norm = torch.nn.utils.clip_grad_norm_(param, *later)
        torch.testing.assert_close(engine.clip_grad_norm_(*later), norm, rtol=1e-4, atol=0)
        engine.step()
        moment = torch.cat([engine.full(name, "exp_avg").reshape(-1) for name in gradients])
        torch.testing.assert_close(moment.norm(), 0.1 * param.grad.norm(), rtol=1e-4, atol=0)


def test_float16_shows_gradients_without_the_scale() -> None:
    with after_backward(fp16={"enabled": True, "initial_scale_power": 10}) as engine:
        gradients = [engine.gradient(name) for name, _ in engine.named_parameters()]
        total = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None]).norm()
        norm = engine.clip_grad_norm_(math.inf)
        assert total.dtype == torch.float32 and 0.01 < total < 100
        torch.testing.assert_close(norm, total, rtol=1e-3, atol=0)
        engine.step()


def test_the_config_may_clip_and_the_norm_be_asked_for() -> None:
    with after_backward(gradient_clipping=0.25) as engine:
        assert engine.clip_grad_norm_(math.inf) == engine.clip_grad_norm_(0.25)
        words = "found max_norm 1 (norm_type 2) and gradient_clipping 0.25 in the config, which clips each step"
        assert words in refusal(engine.clip_grad_norm_, 1.0)
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_not_finite(stage: int) -> None:
    """It can be put right."""
    with after_backward(stage) as engine:
        gradient = engine.gradient("last.bias")
        assert gradient is not None
        engine.set_gradient("last.bias", gradient * torch.nan)
        assert engine.clip_grad_norm_(1.0).isnan()
        words = "expected a finite total norm, found nan: a gradient is not finite"
        assert words in refusal(engine.clip_grad_norm_, 1.0, error_if_nonfinite=True, kind=RuntimeError)
        engine._steps.accumulated.clipping_by_hand = None
        engine.set_gradient("last.bias", gradient)
        assert engine.step().grad_norm.isfinite()
        backward(engine)
        engine.set_gradient("last.bias", gradient * torch.nan)
        with pytest.raises(lowtide.NonFiniteGradientError, match=r"in the gradient of 'last\.bias'"):
            engine.step()


@on_ranks(2)
def test_a_backward_after_a_gradient_was_put_right() -> None:
    for stage in (0, 3):
        with initialize(stage) as engine:
            engine.backward(engine(*models.vector_batch(0, 2)) * torch.nan)
            for name, _ in engine.named_parameters():
                if (gradient := engine.gradient(name)) is not None:
                    engine.set_gradient(name, torch.ones_like(gradient))
            backward(engine)
            assert engine.step().grad_norm.isfinite()


def test_a_backward_after_clipping_would_not_be_clipped() -> None:
    with after_backward() as engine:
        engine.clip_grad_norm_(1.0)
        loss = engine(*models.vector_batch(0, 2))
        words = "backward: expected engine.step() after engine.clip_grad_norm_(), found another backward, whose gr"
        assert words in refusal(engine.backward, loss, kind=StateError)
        assert engine.step().loss.isfinite()


CLIP = "engine.clip_grad_norm_()"
SET = "engine.set_gradient() (safe_set_full_grad in lowtide.deepspeed)"
SET_LOCAL = "engine.set_gradient() (safe_set_local_grad in lowtide.deepspeed)"
READ = "engine.gradient() (safe_get_full_grad in lowtide.deepspeed)"
CALLS: dict[str, Callable[[Engine], Any]] = {
    CLIP: lambda engine: engine.clip_grad_norm_(1.0),
    SET: lambda engine: engine.set_gradient("last.bias", torch.zeros(3)),
    READ: lambda engine: engine.gradient("last.bias"),
}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda engine: engine.clip_grad_norm_(1.0, norm_type=3), f"{CLIP}: expected a norm_type of 2 or inf, found 3"),
        (lambda engine: engine.clip_grad_norm_(-1), f"{CLIP}: expected a max_norm of 0 or more, found -1"),
        (lambda engine: engine.clip_grad_norm_(math.nan), f"{CLIP}: expected a max_norm of 0 or more, found nan"),
        (
            lambda engine: engine.set_gradient("last.bias", torch.ones(4)),
            (SET, "shape (3,), ", " for 'last.bias', foun"),
        ),
        (
            lambda engine: engine.set_gradient("last.bias", torch.ones(4), local=True),
            (SET_LOCAL, "this rank's part, flat"),
        ),
        (
            lambda engine: engine.set_gradient("first.bias", torch.ones(7)),
            (SET, "a trained parameter, found the frozen 'first.bia"),
        ),
        (lambda engine: engine.set_gradient("bias", torch.ones(7)), (SET, "a parameter of the model or its name")),
    ],
)
def test_what_is_no_norm_and_no_gradient_is_refused(call: Any, text: str | tuple[str, ...]) -> None:
    with after_backward() as engine:
        found = refusal(call, engine)
        assert all(part in found for part in ((text,) if isinstance(text, str) else text)), found
        engine.step()


@pytest.mark.parametrize("what", [CLIP, SET])
def test_clipping_and_setting_are_for_the_time_between_the_last_backward_and_the_step(what: str) -> None:
    with initialize(gradient_accumulation_steps=2) as engine:
        for count in (0, 1):
            assert refusal(CALLS[what], engine, kind=StateError) == (
                f"{what}: expected the gradients of a whole step, found {count} of 2 microbatches done "
                "(gradient_accumulation_steps); call it between the last backward and engine.step()"
            )
            backward(engine)
            engine.step()
    with initialize() as engine:
        with engine.no_sync():
            backward(engine)
            text = refusal(CALLS[what], engine, kind=StateError)
        assert "found 1 microbatches done, and none was the last of the step (engine.accumulate, no_sync" in text


def test_a_gradient_is_there_after_a_backward() -> None:
    with initialize(gradient_accumulation_steps=2) as engine:
        for _ in range(2):
            assert refusal(CALLS[READ], engine, kind=StateError) == (
                f"{READ}: expected a backward since the last step, found 0 of 2 microbatches done "
                "(gradient_accumulation_steps); call it between a backward and engine.step()"
            )
            for _ in range(2):
                backward(engine)
                assert CALLS[READ](engine).any()
                engine.step()


def test_gradients_are_set_before_they_are_clipped() -> None:
    with after_backward() as engine:
        engine.clip_grad_norm_(1.0)
        text = refusal(CALLS[SET], engine, kind=StateError)
        assert text.startswith(f"{SET}: expected a call before engine.clip_grad_norm_()")


@pytest.mark.parametrize("what", CALLS)
def test_an_update_in_the_backward_leaves_no_gradients(what: str) -> None:
    with after_backward(2, zero_optimization={"update_in_backward": True}) as engine:
        norm = engine.clip_grad_norm_(math.inf)
        text = refusal(CALLS[what], engine, kind=StateError)
        assert text.startswith(f"{what}: expected update_in_backward false in zero_optimization, found it true: ")
        assert engine.step().grad_norm == norm
