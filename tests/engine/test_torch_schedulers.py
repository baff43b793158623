"""Every scheduler of torch moves the options of the groups as it does in torch; what could not is refused."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import lowtide
from tests import models
from tests.zero.training import ADAMW, ROWS

STEPS = 6


def chain(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)])


def sequence(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 3)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


MAKERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": partial(schedulers.LambdaLR, lr_lambda=lambda step: 0.5**step),
    "MultiplicativeLR": partial(schedulers.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "StepLR": partial(schedulers.StepLR, step_size=2),
    "MultiStepLR": partial(schedulers.MultiStepLR, milestones=[1, 3]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": partial(schedulers.ExponentialLR, gamma=0.9),
    "SequentialLR": sequence,
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=4),
    "ChainedScheduler": chain,
    "CyclicLR": partial(schedulers.CyclicLR, base_lr=1e-3, max_lr=1e-1, step_size_up=2),
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=2),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=1e-1, total_steps=STEPS + 1),
}
REFUSED = {"LRScheduler", "ReduceLROnPlateau"}


def batch(step: int) -> tuple[torch.Tensor, ...]:
    return models.vector_batch(step, ROWS)


def train(config: dict[str, Any], **options: Any) -> list[float]:
    """Losses, and after each step what a scheduler may move."""
    torch.manual_seed(0)
    engine = lowtide.initialize(models.mlp(), {**config, "steps_per_print": 0}, **options)
    found = []
    for step in range(STEPS):
        found.append(engine.train_step(batch(step)).loss.item())
        found += _moved(engine.optimizer)
    engine.close()
    return found


def _moved(optimizer: torch.optim.Optimizer) -> list[float]:
    (group,) = optimizer.param_groups
    return [group["lr"], *group.get("betas", [group.get("momentum")])]


def train_plainly(make_optimizer: Callable[[Any], torch.optim.Optimizer], make: Callable[[Any], Any]) -> list[float]:
    torch.manual_seed(0)
    model = models.mlp()
    optimizer = make_optimizer(model.parameters())
    scheduler = make(optimizer)
    found = []
    for step in range(STEPS):
        loss = model(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        found += [loss.item(), *_moved(optimizer)]
    return found


def test_the_table_has_every_scheduler_of_torch() -> None:
    values = [value for name, value in vars(schedulers).items() if inspect.isclass(value) and not name.startswith("_")]
    names = {value.__name__ for value in values if value.__module__ == schedulers.__name__}
    assert names == {*MAKERS, *REFUSED}


@pytest.mark.parametrize("name", MAKERS)
def test_a_scheduler_of_torch_does_what_it_does_in_torch(name: str) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    found = train({"optimizer": ADAMW}, lr_scheduler=MAKERS[name])
    assert found == pytest.approx(train_plainly(adamw, MAKERS[name]), rel=1e-5)
    found = train({}, optimizer=sgd, lr_scheduler=MAKERS[name])
    assert found == pytest.approx(train_plainly(sgd, MAKERS[name]), rel=1e-5)


def of_another(model: nn.Module) -> dict[str, Any]:
    other = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"lr_scheduler": schedulers.ConstantLR(other)}


def of_another_beside_its_own(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(model.parameters()), **of_another(model)}


def made_of_another(model: nn.Module) -> dict[str, Any]:
    return {"lr_scheduler": lambda optimizer: of_another(model)["lr_scheduler"]}


def given(value: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"lr_scheduler": value}


ANOTHER = (
    r"lr_scheduler: expected a scheduler of the optimizer that is passed to initialize, found ConstantLR of "
    r"another AdamW, .*pass that optimizer too, or a callable such as lambda optimizer: ConstantLR\(optimizer, ...\)"
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (of_another, ANOTHER),
        (of_another_beside_its_own, ANOTHER),
        (made_of_another, ANOTHER),
        (
            given(schedulers.ReduceLROnPlateau),
            r"whose step\(\) needs nothing, .* found ReduceLROnPlateau, which needs 'metrics'; make it over "
            r"engine.optimizer after initialize, and call its step yourself",
        ),
        (given("cosine"), r"expected a scheduler with a step\(\), or a callable that makes one .*, found str"),
        (given(lambda optimizer: None), r"a callable that returns a scheduler with a step\(\), found NoneType"),
        (
            given(MAKERS["OneCycleLR"]),
            r"found a momentum of 0.95 that OneCycleLR has set .* give the optimizer a momentum",
        ),
    ],
)
def test_a_scheduler_that_could_not_act_is_refused(options: Callable[[nn.Module], dict[str, Any]], words: str) -> None:
    model = models.mlp()
    chosen = options(model)
    config = {} if "optimizer" in chosen else {"optimizer": {"type": "sgd", "params": {"lr": 1e-2}}}
    with pytest.raises(ValueError, match=words):
        lowtide.initialize(model, config, **chosen)


def test_a_scheduler_that_needs_a_value_may_be_stepped_by_the_caller() -> None:
    engine = lowtide.initialize(models.mlp(), {"optimizer": ADAMW, "steps_per_print": 0})
    scheduler = schedulers.ReduceLROnPlateau(engine.optimizer, patience=0)
    for loss in (1.0, 2.0):
        engine.train_step(batch(0))
        scheduler.step(loss)
    assert engine.lr == pytest.approx(1e-3)
    engine.close()
