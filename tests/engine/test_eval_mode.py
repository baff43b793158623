"""Evaluation: the mean loss over the ranks, no dropout, no gradient, and training goes on as if nothing had been."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.model.recomputing import in_eval_mode
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, settings, share_of, take_step, train

CASE = Case(partial(models.TinyGPT, layers=2), models.token_batch, clip=0.3, steps=2)


def train_and_evaluate(case: Case) -> tuple[Outcome, list[float]]:
    """With an evaluation of each batch before its step, and of a batch of another size after it."""
    evaluated = []

    def take(engine: lowtide.Engine, case: Case, step: int) -> Any:
        evaluated.append(engine.eval_step(case.share(engine, step)).item())
        assert engine.module.training
        result = take_step(engine, case, step)
        engine.eval_step(share_of(case.batch(99, 6 * engine.world_size)))
        return result

    return train(case, take), evaluated


def evaluate_and_not(cases: list[Case]) -> list[tuple[Outcome, Outcome, list[float]]]:
    return [(train(case), *train_and_evaluate(case)) for case in cases]


def test_eval_step_gives_the_loss_and_changes_nothing(ranks: RankPool) -> None:
    places = [("sockets", 0), ("shared_memory", 1), ("sockets", 3)]
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for transport, stage in places]
    for expected, found, evaluated in ranks(2, evaluate_and_not, cases)[0]:
        assert found.differences(expected) == []
        assert evaluated == pytest.approx(found.losses, rel=1e-6)


def test_eval_step_is_in_eval_mode_and_keeps_the_mode() -> None:
    modes: list[bool] = []
    model = models.Mlp()
    model.layers[0].register_forward_hook(lambda module, *_: modes.append(module.training))
    batch = models.vector_batch(0, 8)
    with lowtide.initialize(model, settings(3)) as engine:
        for mode in (True, False):
            assert engine.train(mode) is engine
            engine.eval_step(batch)
            assert model.training == model.first.training == mode
        assert modes == [False, False]
        assert engine.train() is engine and model.training
        assert engine.eval() is engine and not model.training


def test_what_is_tried_leaves_modes_and_buffers_as_they_were() -> None:
    class Counter(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self) -> Tensor:
            self.count += 1
            return self.count

    model = Counter()
    with in_eval_mode(model):
        assert not model.training and [model().item(), model().item()] == [1, 2]
    assert model.training and model.count == 0


def forward_under_no_grad(stage: int) -> list[Any]:
    torch.manual_seed(0)
    engine = lowtide.initialize(CASE.build(), CASE.at(stage).as_config())
    batch = share_of(CASE.global_batch(0, engine.world_size))
    with torch.no_grad():
        first = engine(*batch).item()
    second = engine.train_step(batch).loss.item()
    with torch.inference_mode():
        engine(*batch)
    third = engine.train_step(batch).loss.item()
    return [first, second, third]


def test_a_forward_without_gradients_may_come_between_steps(ranks: RankPool) -> None:
    found = [ranks(2, forward_under_no_grad, stage) for stage in (0, 3)]
    assert found[0] == found[1]
    mean = sum(losses[0] for losses in found[0]) / 2
    assert found[0][0][1] == pytest.approx(mean, rel=1e-6)
