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
from tests.kit.training import ADAMW, ROWS

STEPS = 6
DELAYED = {"device": "cpu", "overlap": "delayed"}


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


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    biases = [param for param in model.parameters() if param.dim() == 1]
    weights = [param for param in model.parameters() if param.dim() > 1]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 2e-2}, {"params": biases, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


WAYS = ("an object", "by hand", "by hand over the caller's")


def all_moved(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group[name] for group in optimizer.param_groups for name in ("lr", "momentum")]


@pytest.mark.parametrize(("name", "way"), list(zip(MAKERS, cycle(WAYS), strict=False)))
def test_schedulers_as_objects_and_by_hand(name: str, way: str) -> None:
    """Of each group, and the parameters are torch's too."""
    make = MAKERS[name]
    plain: Any = seeded()
    expected_optimizer = two_groups(plain)
    expected_scheduler = make(expected_optimizer)
    model = seeded()
    optimizer = two_groups(model)
    scheduler: Any = make(optimizer) if way != "by hand" else None
    given = {"lr_scheduler": scheduler} if way == "an object" else {}
    engine = lowtide.initialize(model, {"steps_per_print": 0}, optimizer=optimizer, **given)
    if way == "by hand":
        scheduler = make(engine.optimizer)
    for step in range(STEPS):
        engine.train_step(batch(step))
        if way != "an object":
            scheduler.step()
        expected_optimizer.zero_grad()
        plain(*batch(step)).backward()
        expected_optimizer.step()
        expected_scheduler.step()
        assert all_moved(engine.optimizer) == pytest.approx(all_moved(expected_optimizer), rel=1e-12)
        assert engine.lr == engine.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    found = engine.state_dict()
    engine.close()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp()


@pytest.mark.parametrize("zero", [{"update_in_backward": True}, {"offload_optimizer": DELAYED}])
def test_an_update_that_is_not_after_the_norm_counts_for_a_scheduler_by_hand(zero: dict[str, Any]) -> None:
    """Torch's scheduler warns where it was stepped, and the optimizer was not."""
    engine = lowtide.initialize(models.mlp(), {"optimizer": ADAMW, "zero_optimization": zero, "steps_per_print": 0})
    scheduler = schedulers.ExponentialLR(engine.optimizer, 0.5)
    for step in range(2):
        engine.train_step(batch(step))
        scheduler.step()
    assert engine.lr == pytest.approx(1e-2 / 4)
    engine.close()


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2},
}


def test_the_table_has_every_scheduler_of_transformers() -> None:
    from transformers import SchedulerType

    needs_a_metric = {"reduce_lr_on_plateau"}
    of_layers = {"greedy"}  # and of an optimizer of their own kind
    assert {one.value for one in SchedulerType} - needs_a_metric - of_layers == set(TRANSFORMERS)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_scheduler_of_transformers(name: str) -> None:
    from transformers import get_scheduler

    def make(optimizer: Any) -> Any:
        return get_scheduler(name, optimizer, 2, STEPS, scheduler_specific_kwargs=dict(TRANSFORMERS[name]))

    adamw = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    found = train({"optimizer": ADAMW}, lr_scheduler=make)
    assert found == pytest.approx(train_plainly(adamw, make), rel=1e-5)


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
    r"lr_scheduler: expected a scheduler of the optimizer that is passed to initialize, found ConstantLR of another "
    r"AdamW, .*pass that optimizer too, or a callable, for example lambda optimizer: ConstantLR\(optimizer, ...\)"
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (of_another, ANOTHER),
        (of_another_beside_its_own, ANOTHER),
        (made_of_another, ANOTHER),
        (
            given(schedulers.ReduceLROnPlateau),
            r"whose step\(\) needs no argument, .* found ReduceLROnPlateau, whose step\(\) needs 'metrics'; make it "
            r"with engine.optimizer after initialize, and call its step yourself",
        ),
        (given("cosine"), r"expected a scheduler with a step\(\), or a callable optimizer -> scheduler, found str"),
        (given(lambda optimizer: None), r"a callable that returns a scheduler with a step\(\), found NoneType"),
        (
            given(MAKERS["OneCycleLR"]),
            r"found momentum 0.95 set by OneCycleLR .* give the optimizer a momentum",
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
