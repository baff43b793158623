"""A gradient that the caller sets is what the step clips and updates with, as in torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, adamw, one_thread, share_of

CASE = Case(models.mlp_float64, models.vector_batch_float64, accumulation=2, clip=0.3, steps=3)
SKIPPED = "layers.1.bias"  # at step 1
NOISED = ("first.weight", "layers.0.weight")
SIGNED = "last.weight"  # by each rank's own part


def noise(shape: torch.Size) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def change(engine: Engine, step: int) -> None:
    for name in NOISED:
        gradient = engine.gradient(name)
        assert gradient is not None
        engine.set_gradient(name, gradient + noise(gradient.shape))
    part = engine.gradient(SIGNED, local=True)
    assert part is not None
    engine.set_gradient(SIGNED, part.sign(), local=True)
    if step == 1:
        engine.set_gradient(engine.module.get_parameter(SKIPPED), None)
        assert engine.gradient(SKIPPED) is None


def train(cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for case in cases:
        torch.manual_seed(0)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            norms = []
            for step in range(case.steps):
                share = share_of(case.global_batch(step, engine.data_size))
                for part in zip(*(tensor.chunk(case.accumulation) for tensor in share), strict=True):
                    engine.backward(engine(*part))
                change(engine, step)
                norms.append(engine.step().grad_norm.item())
            found.append((norms, engine.state_dict()))
    return found


@one_thread()
def train_plainly(case: Case, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = case.build()
    params, norms = dict(model.named_parameters()), []
    optimizer = adamw(model.parameters())
    for step in range(case.steps):
        optimizer.zero_grad()
        model(*case.global_batch(step, world_size)).backward()
        for name in NOISED:
            gradient = params[name].grad
            assert gradient is not None
            gradient += noise(gradient.shape)
        gradient = params[SIGNED].grad
        assert gradient is not None
        params[SIGNED].grad = gradient.sign()
        if step == 1:
            params[SKIPPED].grad = None
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip).item())
        optimizer.step()
    return norms, dict(model.state_dict())


def test_steps_are_of_what_was_set(ranks: RankPool, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    speculative = {"zero_optimization": {"offload_optimizer": {**nvme, "overlap": "speculative"}}}
    cases = [CASE.at(stage) for stage in (0, 1, 2, 3)]
    cases.append(CASE.at(3, config={"communication": {"transport": "sockets"}, **speculative}))
    cases.append(CASE.at(0, config={"communication": {"transport": "sockets"}}))
    expected = train_plainly(CASE, 2)
    for found in ranks(2, train, cases)[0]:
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def engine_after_backward(**config: Any) -> Engine:
    torch.manual_seed(0)
    model = models.mlp()
    model.get_parameter("first.bias").requires_grad_(False)
    engine = lowtide.initialize(model, {"optimizer": {"type": "adamw"}, "steps_per_print": 0, **config})
    engine.backward(engine(*models.vector_batch(0, 2)))
    return engine


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_not_finite_can_be_put_right(stage: int) -> None:
    with engine_after_backward(zero_optimization={"stage": stage}) as engine:
        gradient = engine.gradient("last.bias")
        assert gradient is not None
        engine.set_gradient("last.bias", gradient * torch.nan)
        assert engine.clip_grad_norm_(torch.inf).isnan()
        engine._steps.accumulated.clipping_by_hand = None
        engine.set_gradient("last.bias", gradient)
        assert engine.step().grad_norm.isfinite()
        engine.backward(engine(*models.vector_batch(0, 2)))
        engine.set_gradient("last.bias", gradient * torch.nan)
        with pytest.raises(lowtide.NonFiniteGradientError, match=r"in the gradient of 'last\.bias'"):
            engine.step()


REFUSED: dict[str, tuple[Any, str]] = {
    "shape": (
        lambda engine: engine.set_gradient("last.bias", torch.ones(4)),
        r"shape \(3,\), .* for 'last.bias', foun",
    ),
    "part": (lambda engine: engine.set_gradient("last.bias", torch.ones(4), local=True), "this rank's part, flat"),
    "frozen": (
        lambda engine: engine.set_gradient("first.bias", torch.ones(7)),
        "a trained parameter, found 'first.bia",
    ),
    "name": (lambda engine: engine.set_gradient("bias", torch.ones(7)), "a parameter of the model or its name"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_gradient_is_refused(what: str) -> None:
    call, words = REFUSED[what]
    with engine_after_backward() as engine:
        with pytest.raises(
            ValueError, match=rf"engine.set_gradient\(\) \(safe_set_(full|local)_grad in lowtide.deepspeed\): .*{words}"
        ):
            call(engine)
        engine.step()


def test_times_at_which_none_can_be_set() -> None:
    def refused(engine: Engine, words: str) -> None:
        with pytest.raises(
            StateError,
            match=rf"engine.set_gradient\(\) \(safe_set_(full|local)_grad in lowtide.deepspeed\): expected {words}",
        ):
            engine.set_gradient("last.bias", torch.ones(3))

    with engine_after_backward() as engine:
        engine.clip_grad_norm_(1.0)
        refused(engine, r"a call before engine.clip_grad_norm_\(\)")
        engine.step()
        refused(engine, "the gradients of a whole step, found 0 of 1 microbatches")
    with engine_after_backward(zero_optimization={"stage": 2, "update_in_backward": True}) as engine:
        refused(engine, "update_in_backward false")
        engine.step()


def set_on_one_rank_alone() -> None:
    with engine_after_backward() as engine:
        engine.set_gradient("last.bias", torch.ones(3) if engine.rank else None)


def test_ranks_that_set_different_kinds(ranks: RankPool) -> None:
    for failure in ranks.fails(2, set_on_one_rank_alone):
        assert "expected None for 'last.bias' on all ranks or on none, found both" in failure.text
