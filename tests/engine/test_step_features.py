"""A new part of a step is a class and a row: it is called at its moments, whichever driver runs the model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import assemble
from lowtide.engine.features import FEATURES
from lowtide.engine.step.features import Access, StepFeature, StepFeatures, StepResult
from lowtide.engine.step.parts import Parts
from tests.kit.ranks import RankPool

SEEN: list[str] = []
FORWARD = ["forward", "around", "end of around"]
BACKWARD = ["call: backward", "backward"]
UPDATE = ["step", "call: engine.step()", "update", "updated", "step 1", "next after 1"]


class Spy(StepFeature):
    """Notes each moment."""

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls() if parts.config.steps_per_print == 7 else None

    def before_call(self, what: str, access: Access) -> None:
        if access is not Access.LOOKS:  # a forward asks more than once
            SEEN.append(f"call: {what}")

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        SEEN.append("forward")

    def around_forward(self) -> AbstractContextManager[object]:
        @contextmanager
        def noted() -> Any:
            SEEN.append("around")
            yield
            SEEN.append("end of around")

        return noted()

    def before_evaluation(self, batch: Any) -> None:
        SEEN.append("evaluation")

    def before_backward(self) -> None:
        SEEN.append("backward")

    def before_step(self) -> None:
        SEEN.append("step")

    def before_update(self) -> None:
        SEEN.append("update")

    def after_update(self, skipped: bool) -> None:
        SEEN.append("updated")

    def after_step(self, step: int, result: StepResult) -> None:
        SEEN.append(f"step {step}")

    def before_next_step(self, step: int) -> None:
        SEEN.append(f"next after {step}")

    def close(self) -> None:
        SEEN.append("close")


def seen(parallel: dict[str, int], every: int = 7) -> list[str]:
    """What the feature, in a row of its own, sees of a step of two microbatches and an evaluation."""
    SEEN.clear()
    with mock.patch.object(assemble, "FEATURES", (*FEATURES, Spy)):
        config: dict[str, Any] = {"optimizer": {"type": "sgd"}, "gradient_accumulation_steps": 2, "parallel": parallel}
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        loss_fn = lambda output, batch: output.square().mean()  # noqa: E731
        with lowtide.initialize(model, {**config, "steps_per_print": every}, loss_fn=loss_fn) as engine:
            batch = torch.ones(4, 4)
            engine.train_step(batch)
            engine.eval_step(batch)
    return list(SEEN)


def test_a_feature_sees_the_moments_of_a_step_in_order() -> None:
    step = [*FORWARD, *BACKWARD] * 2 + UPDATE
    assert seen({}) == ["next after 0", *step, "evaluation", "call: engine.close()", "close"]


def test_with_stages_a_forward_is_that_of_all_microbatches(ranks: RankPool) -> None:
    expected = ["next after 0", "forward", *BACKWARD, *UPDATE, "evaluation", "call: engine.close()", "close"]
    assert ranks(2, seen, {"pipeline": 2}) == [expected] * 2


def test_a_feature_that_is_off_is_not_called() -> None:
    assert seen({}, every=0) == []


def test_only_moments_that_a_feature_defines_are_called() -> None:
    features = StepFeatures((Spy, StepFeature))
    features.turn_on(StepFeature())
    assert not any(getattr(features, moment) for moment in StepFeatures.__annotations__)


@pytest.mark.parametrize("moment", list(StepFeatures.__annotations__))
def test_features_come_in_the_order_of_the_table(moment: str) -> None:
    class First(StepFeature):
        pass

    class Second(StepFeature):
        pass

    for kind in (First, Second):
        setattr(kind, moment, lambda self: type(self))
    features = StepFeatures((First, Second))
    for kind in (Second, First):
        features.turn_on(kind())
    assert [call() for call in getattr(features, moment)] == [First, Second]
    features.turn_off(features.get(First))
    assert [call() for call in getattr(features, moment) if moment != "after_new_groups"] in ([Second], [])
