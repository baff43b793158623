"""Every form of a step, kind of batch and place of the loss in the output is the same training."""

import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, Outcome, assert_alike, refusal, settings, start, take_step, train, train_plainly

CASE = Case(models.mlp, models.vector_batch, accumulation=3, steps=2, clip=0.05)
Pair = namedtuple("Pair", ["x", "y"])


def classic(engine: lowtide.Engine, case: Case, step: int) -> Any:
    """loss = engine(...); engine.backward(loss); engine.step(), for each microbatch."""
    for index, (x, y) in enumerate(case.microbatches(engine, step)):
        engine.backward(engine(x, y=y))
        result = engine.step()
        assert engine.global_step == step + (index == case.accumulation - 1)
    return result


def from_iterator(case: Case) -> Outcome:
    """train_step draws its microbatches from one iterator over the whole training."""
    drawn: list[Iterator[Any]] = []

    def take(engine: lowtide.Engine, case: Case, step: int) -> Any:
        if not drawn:
            drawn.append(part for number in range(case.steps) for part in case.microbatches(engine, number))
        result = engine.train_step(drawn[0])
        if step == case.steps - 1:
            words = "the iterator given to train_step ended after 0 of 3 microbatches"
            assert words in refusal(engine.train_step, drawn[0])
        return result

    return train(case, take)


@on_ranks(2)
def test_the_classic_form_and_an_iterator_equal_train_step() -> None:
    for stage in (0, 3):
        case = CASE.at(stage, config={"bf16": {"enabled": stage == 3}})
        assert_alike([train(case), train(case, classic), from_iterator(case)], case)


def test_an_interrupt_before_the_update_leaves_no_gradients() -> None:
    case = Case(models.mlp, models.vector_batch)
    whole = train(case)
    with start(case) as engine:
        with patch.object(engine._steps, "end", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            take_step(engine, case, 0)
        assert [take_step(engine, case, step).grad_norm.item() for step in range(case.steps)] == whole.norms


class Checked(models.Mlp):
    def forward(self, x: Tensor, y: Tensor, unused: Any = None) -> Tensor:
        if unused is not None:
            assert torch.equal(unused["a"][0], x) and unused["a"][1:] == [3, "text", None]
        return super().forward(x, y)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: {"y": y, "x": x},
        lambda x, y: [x, y],
        Pair,
        lambda x, y: {"x": x, "y": y, "unused": {"a": [x, 3, "text", None]}},
    ],
    ids=["mapping", "list", "named tuple", "nested"],
)
def test_every_kind_of_batch_is_split_and_passed_on(make: Callable[..., Any]) -> None:
    with start(CASE.at(0, build=Checked)) as engine:
        found = [engine.train_step(make(*CASE.global_batch(step, 1))).loss.item() for step in range(CASE.steps)]
    assert found == train(CASE).losses


class Scaled(nn.Linear):
    def forward(self, x: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        assert x.shape == (2, 4)
        return super().forward(x).square().mean() * factor


def test_a_tensor_is_passed_alone_and_a_value_without_rows_to_every_microbatch() -> None:
    model, batch = Scaled(4, 2), torch.randn(6, 4)
    expected = sum(model(part).item() for part in batch.chunk(3)) / 3
    with lowtide.initialize(model, CASE.as_config()) as engine:
        assert engine.train_step(batch).loss.item() == pytest.approx(expected, rel=1e-6)
    expected = sum(5 * model(part).item() for part in batch.chunk(3)) / 3
    with lowtide.initialize(model, CASE.as_config()) as engine:
        assert engine.train_step((batch, torch.tensor(5.0))).loss.item() == pytest.approx(expected, rel=1e-5)


OUTPUTS = Case(models.mlp, models.vector_batch, stage=3)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Wrapped(models.Mlp):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.wrap(self.last(torch.tanh(self.first(x))), super().forward(x, y))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, loss: loss.reshape(1, 1),
        lambda logits, loss: Output(logits, loss),
        lambda logits, loss: {"logits": logits, "loss": loss},
        lambda logits, loss: (loss, logits),
        lambda logits, loss: [loss, logits],
    ],
    ids=["one element", "attribute", "mapping", "tuple", "list"],
)
def test_the_loss_is_found_in_the_output(wrap: Any) -> None:
    case = OUTPUTS.at(3, build=partial(Wrapped, wrap))
    expected = train_plainly(OUTPUTS, 1).losses
    assert train(case).losses == pytest.approx(expected, rel=1e-5)
    with start(case) as engine:
        assert engine.eval_step(case.share(engine, 0)).item() == pytest.approx(expected[0], rel=1e-5)


def test_loss_fn_gets_output_and_batch() -> None:
    def loss_fn(output: Output, batch: Any) -> Tensor:
        assert isinstance(output, Output) and len(batch) == 2
        return output.logits

    case = OUTPUTS.at(3, build=partial(Wrapped, lambda logits, loss: Output(loss)))
    assert train(case, loss_fn=loss_fn).losses == pytest.approx(train_plainly(OUTPUTS, 1).losses, rel=1e-5)


class Summed(nn.Module):
    """Its loss needs no value of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.FEATURES, 3)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        logits = self.layer(x)
        self.made = weakref.ref(logits.untyped_storage())
        return Output(logits, logits.sum())


def test_logits_are_gone_when_the_backward_comes() -> None:
    model, found = Summed(), list[object]()
    with lowtide.initialize(model, settings(3)) as engine:
        model.layer.weight.register_hook(lambda _: found.append(model.made()))
        engine.train_step(models.vector_batch(0, 2))
    assert found == [None]


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda logits, loss: logits, "found a tensor of shape (2, 3)"),
        (lambda logits, loss: Output(logits), "found Output"),
        (lambda logits, loss: {"logits": logits}, "found dict"),
        (lambda logits, loss: None, "found NoneType"),
    ],
)
def test_an_output_without_a_loss_is_an_error(wrap: Any, found: str) -> None:
    assert refusal(train, OUTPUTS.at(3, build=partial(Wrapped, wrap))) == (
        "loss: expected a tensor with a single element as the model's output, or as its .loss, "
        f'["loss"] or [0], {found}; give initialize(..., loss_fn=lambda output, batch: ...)'
    )
