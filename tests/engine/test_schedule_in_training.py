"""The scheduler of the config moves the learning rate of each update, skipped updates left out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.kit import models
from tests.kit.training import Case, train, train_plainly

BASE = 0.1
STEPS = 8


def linear(step: int) -> float:
    """Warm-up in 2 steps, then a straight line down to a tenth at step 6."""
    return step / 2 if step < 2 else 0.1 + 0.9 * max(0.0, 1 - (step - 2) / 4)


def cosine(step: int) -> float:
    return step / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 3) / 4)))


SCHEDULES: list[tuple[dict[str, Any], Any]] = [
    ({"type": "constant", "params": {"warmup_num_steps": 4}}, lambda step: min(1.0, step / 4)),
    ({"type": "linear", "params": {"warmup_num_steps": 2, "total_num_steps": 6, "min_ratio": 0.1}}, linear),
    ({"type": "cosine", "params": {"warmup_num_steps": 3, "total_num_steps": 7}}, cosine),
]


class Scheduled:
    """SGD whose learning rate is set before each step."""

    def __init__(self, params: list[Tensor], ratio: Any) -> None:
        self._optimizer = torch.optim.SGD(params, lr=BASE * ratio(0))
        self._ratio, self._steps = ratio, 0
        self.param_groups = self._optimizer.param_groups
        self.zero_grad = self._optimizer.zero_grad

    def step(self) -> None:
        self._optimizer.step()
        self._steps += 1
        self.param_groups[0]["lr"] = BASE * self._ratio(self._steps)


@pytest.mark.parametrize(("section", "ratio"), SCHEDULES, ids=["constant", "linear", "cosine"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_learning_rate_of_each_update(section: dict[str, Any], ratio: Any, stage: int) -> None:
    config = {"scheduler": section, "optimizer": {"type": "sgd", "params": {"lr": BASE}}}
    case = Case(models.mlp_float64, models.vector_batch_float64, stage, accumulation=2, steps=STEPS, config=config)
    found = train(case)
    assert found.lrs == pytest.approx([BASE * ratio(step) for step in range(STEPS)], rel=1e-12, abs=1e-15)
    expected: Any = train_plainly(case, 1, lambda params: Scheduled(params, ratio))  # type: ignore[arg-type,return-value]
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)


def test_a_skipped_update_does_not_move_the_learning_rate() -> None:
    config = {
        "scheduler": {"type": "constant", "params": {"warmup_num_steps": 4}},
        "optimizer": {"type": "sgd", "params": {"lr": BASE}},
        "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1},
    }
    found = train(Case(models.mlp, models.vector_batch, steps=6, config=config))
    assert found.skipped[:2] == [True, True] and found.skipped[-3:] == [False] * 3
    taken = 0
    for lr, skipped in zip(found.lrs, found.skipped, strict=True):
        assert lr == pytest.approx(BASE * min(1.0, taken / 4))
        taken += not skipped


def test_every_parameter_group_keeps_its_own_base() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}])
    config = {"scheduler": {"type": "linear", "params": {"total_num_steps": 4}}, "steps_per_print": 0}
    engine = lowtide.initialize(model, config, optimizer=optimizer, loss_fn=lambda output, batch: output.sum())
    for step in range(3):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.1 * (1 - step / 4), 0.01 * (1 - step / 4)]
        )
        engine.train_step((torch.ones(2, 3),))
    engine.close()
