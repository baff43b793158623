"""The classic form, iterators of microbatches and every kind of batch are the same training."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, share_of, train

CASE = Case(models.mlp, models.vector_batch, accumulation=3, clip=0.05)
Pair = namedtuple("Pair", ["x", "y"])


def microbatches_of(case: Case, step: int, world_size: int) -> list[tuple[Tensor, ...]]:
    share = share_of(case.global_batch(step, world_size))
    return list(zip(*(tensor.chunk(case.accumulation) for tensor in share), strict=True))


def classic(case: Case) -> Outcome:
    """loss = engine(...); engine.backward(loss); engine.step(), for each microbatch."""
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())
    outcome = Outcome()
    for step in range(case.steps):
        for index, (x, y) in enumerate(microbatches_of(case, step, engine.world_size)):
            loss = engine(x, y=y)
            engine.backward(loss)
            result = engine.step()
            is_boundary = index == case.accumulation - 1
            assert engine.global_step == step + is_boundary
        outcome.losses.append(result.loss.item())
        outcome.norms.append(result.grad_norm.item())
    outcome.state = engine.state_dict()
    engine.close()
    return outcome


def from_iterator(case: Case) -> Outcome:
    """train_step draws its microbatches from one iterator over the whole training."""
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())

    def draw() -> Iterator[tuple[Tensor, ...]]:
        for step in range(case.steps):
            yield from microbatches_of(case, step, engine.world_size)

    outcome, drawn = Outcome(), draw()
    for _ in range(case.steps):
        result = engine.train_step(drawn)
        outcome.losses.append(result.loss.item())
        outcome.norms.append(result.grad_norm.item())
    outcome.state = engine.state_dict()
    with pytest.raises(ValueError, match="the iterator given to train_step ended after 0 of 3 microbatches"):
        engine.train_step(drawn)
    engine.close()
    return outcome


def all_ways(cases: list[Case]) -> list[tuple[Outcome, Outcome, Outcome]]:
    return [(train(case), classic(case), from_iterator(case)) for case in cases]


def test_the_classic_form_and_an_iterator_equal_train_step(ranks: RankPool) -> None:
    cases = [CASE.at(stage, config={"bf16": {"enabled": stage in (1, 3)}}) for stage in (0, 1, 2, 3)]
    for expected, *others in ranks(2, all_ways, cases)[0]:
        for outcome in others:
            assert outcome.differences(expected) == []


@pytest.mark.parametrize("kind", ["mapping", "list", "named tuple", "nested"])
def test_every_kind_of_batch_is_split_and_passed_on(kind: str) -> None:
    make: dict[str, Any] = {
        "mapping": lambda x, y: {"y": y, "x": x},
        "list": lambda x, y: [x, y],
        "named tuple": Pair,
        "nested": lambda x, y: {"x": x, "y": y, "unused": {"a": [x, 3, "text", None]}},
    }

    class Model(models.Mlp):
        def forward(self, x: Tensor, y: Tensor, unused: Any = None) -> Tensor:
            if unused is not None:
                assert torch.equal(unused["a"][0], x) and unused["a"][1:] == [3, "text", None]
            return super().forward(x, y)

    torch.manual_seed(0)
    engine = lowtide.initialize(Model(), CASE.as_config())
    expected = train(CASE)
    found = [engine.train_step(make[kind](*CASE.global_batch(step, 1))).loss.item() for step in range(CASE.steps)]
    assert found == expected.losses


def test_a_tensor_is_passed_alone() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape == (2, 4)
            return super().forward(x).square().mean()

    torch.manual_seed(0)
    model = Model(4, 2)
    batch = torch.randn(6, 4)
    expected = model(batch[:2]) + model(batch[2:4]) + model(batch[4:])
    engine = lowtide.initialize(model, CASE.as_config())
    assert engine.train_step(batch).loss.item() == pytest.approx(expected.item() / 3, rel=1e-6)


def test_values_without_rows_go_to_every_microbatch() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]  # an input more
            return super().forward(x).mean() * factor

    model = Model(4, 2)
    batch = torch.randn(6, 4)
    expected = (model(batch, torch.tensor(1.0)) * 5).item()
    engine = lowtide.initialize(model, CASE.as_config())
    assert engine.train_step((batch, torch.tensor(5.0))).loss.item() == pytest.approx(expected, rel=1e-5)
