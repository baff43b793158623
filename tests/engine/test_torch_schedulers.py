"""Every scheduler of torch moves the options of the groups as it does in torch; what could not is refused."""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import lowtide
from tests.kit import models
from tests.kit.training import ADAMW, ROWS, adamw, refusal, settings

STEPS = 6
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
QUIET = settings(optimizer=None)


def chain(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)])


def sequence(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 3)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


def of_transformers(optimizer: Any) -> Any:
    from transformers import get_scheduler

    return get_scheduler("cosine_with_min_lr", optimizer, 2, STEPS, scheduler_specific_kwargs={"min_lr_rate": 0.1})


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
    "of transformers": of_transformers,
}
NEED_A_METRIC = {"LRScheduler", "ReduceLROnPlateau"}


def test_the_table_has_every_scheduler_of_torch() -> None:
    values = [value for name, value in vars(schedulers).items() if inspect.isclass(value) and not name.startswith("_")]
    names = {value.__name__ for value in values if value.__module__ == schedulers.__name__}
    assert names | {"of transformers"} == {*MAKERS, *NEED_A_METRIC}


def batch(step: int) -> tuple[torch.Tensor, ...]:
    return models.vector_batch(step, ROWS)


def two_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    biases, weights = [p for p in params if p.dim() == 1], [p for p in params if p.dim() > 1]
    return SGD([{"params": weights, "lr": 2e-2}, {"params": biases, "weight_decay": 0.1}])


def moved(optimizer: torch.optim.Optimizer) -> list[float]:
    """What a scheduler may move."""
    groups = optimizer.param_groups
    return [value for group in groups for value in (group["lr"], *group.get("betas", [group.get("momentum")]))]


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp()


def train_beside_torch(make: Callable[[Any], Any], way: str) -> None:
    """Losses, options of each step and final values are those of plain torch."""
    chosen: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"of the config": adamw, "a callable": SGD}
    choose = chosen.get(way, two_groups)
    plain, model = seeded(), seeded()
    optimizer, given = choose(plain.parameters()), choose(model.parameters())
    expected: Any = make(optimizer)
    scheduler: Any = None
    if way == "of the config":
        engine = lowtide.initialize(model, {**QUIET, "optimizer": ADAMW}, lr_scheduler=make)
    elif way == "a callable":
        engine = lowtide.initialize(model, QUIET, optimizer=SGD, lr_scheduler=make)
    elif way == "an object":
        scheduler = make(given)
        engine = lowtide.initialize(model, QUIET, optimizer=given, lr_scheduler=scheduler)
    else:
        scheduler = make(given) if way == "by hand over the caller's" else None
        engine = lowtide.initialize(model, QUIET, optimizer=given)
        scheduler = scheduler or make(engine.optimizer)
    for step in range(STEPS):
        found = engine.train_step(batch(step)).loss.item()
        if way.startswith("by hand"):
            scheduler.step()
        loss = plain(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.step()
        assert found == pytest.approx(loss.item(), rel=1e-5)
        assert moved(engine.optimizer) == pytest.approx(moved(optimizer), rel=1e-12)
        assert engine.lr == engine.optimizer.param_groups[0]["lr"]
        assert scheduler is None or engine.lr == scheduler.get_last_lr()[0]
    state = engine.state_dict()
    engine.close()
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


WAYS = ("a callable", "an object", "by hand", "by hand over the caller's")


@pytest.mark.parametrize(("name", "way"), list(zip(MAKERS, cycle(WAYS), strict=False)))
def test_a_scheduler_of_torch_does_what_it_does_in_torch(name: str, way: str) -> None:
    for each in ("of the config", way):
        train_beside_torch(MAKERS[name], each)


@pytest.mark.parametrize(
    "zero", [{"update_in_backward": True}, {"offload_optimizer": {"device": "cpu", "overlap": "delayed"}}]
)
def test_an_update_that_is_not_after_the_norm_counts_for_a_scheduler_by_hand(zero: dict[str, Any]) -> None:
    """Torch's scheduler warns where it was stepped, and the optimizer was not."""
    with lowtide.initialize(models.mlp(), settings(zero_optimization=zero)) as engine:
        scheduler = schedulers.ExponentialLR(engine.optimizer, 0.5)
        for step in range(2):
            engine.train_step(batch(step))
            scheduler.step()
        assert engine.lr == pytest.approx(1e-2 / 4)


def test_a_scheduler_that_needs_a_value_may_be_stepped_by_the_caller() -> None:
    with lowtide.initialize(models.mlp(), settings()) as engine:
        scheduler = schedulers.ReduceLROnPlateau(engine.optimizer, patience=0)
        for loss in (1.0, 2.0):
            engine.train_step(batch(0))
            scheduler.step(loss)
        assert engine.lr == pytest.approx(1e-3)


def of_another(model: nn.Module) -> dict[str, Any]:
    return {"lr_scheduler": schedulers.ConstantLR(torch.optim.AdamW(model.parameters(), lr=1e-3))}


def of_another_beside_its_own(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(model.parameters()), **of_another(model)}


def made_of_another(model: nn.Module) -> dict[str, Any]:
    return {"lr_scheduler": lambda optimizer: of_another(model)["lr_scheduler"]}


def given(value: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"lr_scheduler": value}


ANOTHER = (
    "lr_scheduler: expected a scheduler of the optimizer that is passed to initialize, found ConstantLR of another "
    "AdamW, ",
    "pass that optimizer too, or a callable, for example lambda optimizer: ConstantLR(optimizer, ...)",
)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (of_another, ANOTHER),
        (of_another_beside_its_own, ANOTHER),
        (made_of_another, ANOTHER),
        (
            given(schedulers.ReduceLROnPlateau),
            (
                "whose step() needs no argument, ",
                " found ReduceLROnPlateau, whose step() needs 'metrics'; make it with engine.optimizer after "
                "initialize, and call its step yourself",
            ),
        ),
        (given("cosine"), ("expected a scheduler with a step(), or a callable optimizer -> scheduler, found str",)),
        (given(lambda optimizer: None), ("a callable that returns a scheduler with a step(), found NoneType",)),
        (
            given(MAKERS["OneCycleLR"]),
            ("found momentum 0.95 set by OneCycleLR ", "give the optimizer a momentum"),
        ),
    ],
)
def test_a_scheduler_that_could_not_act_is_refused(
    options: Callable[[nn.Module], dict[str, Any]], texts: tuple[str, ...]
) -> None:
    model = models.mlp()
    chosen = options(model)
    config = {} if "optimizer" in chosen else {"optimizer": {"type": "sgd", "params": {"lr": 1e-2}}}
    text = refusal(lowtide.initialize, model, config, **chosen)
    assert all(part in text for part in texts), text
