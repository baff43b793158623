"""A new part of a step is a class and a row: it is called at its moments, whichever driver runs the model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import assemble
from lowtide.engine.features import FEATURES
from lowtide.engine.step.features import Access, StepFeature, StepFeatures
from lowtide.engine.step.parts import Parts
from tests.kit.ranks import RankPool

SEEN: list[str] = []
FORWARD = ["before_forward", "around", "end of around"]
BACKWARD = ["call: backward", "before_backward"]
UPDATE = ["before_step", "call: engine.step()", "before_update", "after_update", "after_step 1", "before_next_step 1"]
END = ["before_evaluation", "call: engine.close()", "close"]


def noting(moment: str) -> Callable[..., None]:
    """A method that notes its name, and the number of the step if it is told that."""

    def note(self: StepFeature, *given: Any) -> None:
        SEEN.append(f"{moment} {given[0]}" if given and type(given[0]) is int else moment)

    return note


class Spy(StepFeature):
    """Notes each moment."""

    before_forward, before_evaluation = noting("before_forward"), noting("before_evaluation")
    before_backward, before_step = noting("before_backward"), noting("before_step")
    before_update, after_update = noting("before_update"), noting("after_update")
    after_step, before_next_step, close = noting("after_step"), noting("before_next_step"), noting("close")

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls() if parts.config.steps_per_print == 7 else None

    def before_call(self, what: str, access: Access) -> None:
        if access is not Access.LOOKS:  # a forward asks more than once
            SEEN.append(f"call: {what}")

    def around_forward(self) -> AbstractContextManager[object]:
        @contextmanager
        def noted() -> Any:
            SEEN.append("around")
            yield
            SEEN.append("end of around")

        return noted()


def seen(parallel: dict[str, int], every: int = 7) -> list[str]:
    """What the feature, in a row of its own, sees of a step of two microbatches and an evaluation."""
    SEEN.clear()
    with mock.patch.object(assemble, "FEATURES", (*FEATURES, Spy)):
        config: dict[str, Any] = {"optimizer": {"type": "sgd"}, "gradient_accumulation_steps": 2, "parallel": parallel}
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        loss_fn = lambda output, batch: output.square().mean()  # noqa: E731
        with lowtide.initialize(model, {**config, "steps_per_print": every}, loss_fn=loss_fn) as engine:
            engine.train_step(torch.ones(4, 4))
            engine.eval_step(torch.ones(4, 4))
    return list(SEEN)


def test_a_feature_sees_the_moments_of_a_step_in_order() -> None:
    assert seen({}) == ["before_next_step 0", *[*FORWARD, *BACKWARD] * 2, *UPDATE, *END]


def test_with_stages_a_forward_is_that_of_all_microbatches(ranks: RankPool) -> None:
    expected = ["before_next_step 0", "before_forward", *BACKWARD, *UPDATE, *END]
    assert ranks(2, seen, {"pipeline": 2}) == [expected] * 2


def test_a_feature_that_is_off_is_not_called() -> None:
    assert seen({}, every=0) == []


@pytest.mark.parametrize("moment", list(StepFeatures.__annotations__))
def test_features_come_in_the_order_of_the_table(moment: str) -> None:
    first, second = (type(name, (StepFeature,), {moment: lambda self: type(self)}) for name in ("First", "Second"))
    features = StepFeatures((first, second))
    for kind in (second, first):
        features.turn_on(kind())
    assert [call() for call in getattr(features, moment)] == [first, second]
    features.turn_off(features.get(first))
    assert [call() for call in getattr(features, moment) if moment != "after_new_groups"] in ([second], [])
