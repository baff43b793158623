"""Schedules of the config against closed forms and DeepSpeed's values, those of torch against torch."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import lowtide
from lowtide.engine.config.config import Config
from lowtide.engine.config.scheduler import SchedulerConfig
from lowtide.engine.step.lr_schedule import betas_at, schedule_of
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, ROWS, Case, adamw, refusal, settings, train, train_all, train_plainly

BASE = 0.1
SGD = {"type": "sgd", "params": {"lr": BASE}}


def scheduler(kind: str, **params: Any) -> SchedulerConfig:
    section = Config.load({"scheduler": {"type": kind, "params": params}}).scheduler
    assert section is not None
    return section


def rates(kind: str, steps: int, **params: Any) -> list[float]:
    rate = schedule_of(scheduler(kind, **params))
    return [rate(BASE, step) for step in range(steps)]


def torch_rates(make: Any, steps: int) -> list[float]:
    """The learning rate of each of the first updates under a scheduler of torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = make(optimizer)
        found = []
        for _ in range(steps):
            found.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            schedule.step()
    return found


def of_base(*factors: float) -> list[float]:
    return [BASE * factor for factor in factors]


UP = {"warmup_num_steps": 4, "warmup_type": "linear"}
UP_AND_DOWN = {**UP, "total_num_steps": 8}
TRIANGLE = (0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0, 0)
COSINE = [1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        # The first two updates use the first iteration, as in DeepSpeed.
        ("WarmupLR", {"warmup_num_steps": 5}, of_base(0, *(math.log(i + 1) / math.log(5) for i in range(5)), 1, 1)),
        ("WarmupLR", {**UP, "warmup_min_lr": 0.2, "warmup_max_lr": 1.0}, [0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
        # A warm-up of one step is taken as one of two.
        ("warmuplr", {"warmup_num_steps": 1}, of_base(0, 0, 1, 1)),
        ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, of_base(0, 0, 0.5, 1, 1)),
        ("WarmupDecayLR", UP_AND_DOWN, of_base(*TRIANGLE)),
        ("WarmupDecayLR", {**UP_AND_DOWN, "warmup_max_lr": "auto"}, of_base(*TRIANGLE)),
        ("WarmupDecayLR", {**UP_AND_DOWN, "warmup_max_lr": 0.5}, [0.5 * factor for factor in TRIANGLE]),
        (
            "WarmupCosineLR",
            {**UP_AND_DOWN, "warmup_min_ratio": 0.2},
            of_base(0, 0.2, 0.4, 0.6, 0.8, *COSINE, *[1e-4] * 5),
        ),
        ("constant", {}, of_base(1, 1, 1)),
    ],
)
def test_rates_are_those_of_the_formula(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(kind, len(expected), **params) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR", "linear", "cosine"])
def test_fewer_steps_than_the_warmup_is_no_crash(kind: str) -> None:
    found = rates(kind, 20, warmup_num_steps=10, total_num_steps=5)
    assert all(rate >= 0 for rate in found) and found[15] <= 1e-3 * BASE


LATE = [0.1, 0.1, 0.1, 0.55, 0.55, 1.0, 0.7, 0.4, 0.4, 0.1, 0.1]
FIRST_BETAS = [0.7, 0.85, 0.8, 0.75, 0.7, 0.7333, 0.7667, 0.8, 0.8333, 0.8667, 0.9, 0.9045]
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
DECAYING = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01, "cycle_min_mom": 0.7}
STAIRS = {"cycle_first_step_size": 5, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [  # what DeepSpeed 0.19.8 sets before each update
        (
            "OneCycle",
            {**CYCLE, **DECAYING, "cycle_first_step_size": 4, "cycle_second_step_size": 6},
            [0.1, 0.325, 0.55, 0.775, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.08, 0.066667, 0.057143],
        ),
        ("OneCycle", {**CYCLE, **STAIRS}, LATE),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4}, [0.01, 0.0125, 0.015, 0.0175]),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": [0.01], "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
            [0.01, 0.01, 0.02, 0.02, 0.03],
        ),
    ],
)
def test_cycles_and_range_tests_are_those_of_deepspeed(kind: str, params: dict[str, Any], expected: Any) -> None:
    assert rates(kind, len(expected), **params) == pytest.approx(expected, abs=1e-6)


def test_the_first_beta_goes_against_the_rate() -> None:
    cycle = scheduler("OneCycle", **CYCLE, **DECAYING, cycle_first_step_size=4, cycle_second_step_size=6)
    found = [betas_at(cycle, step) for step in range(len(FIRST_BETAS))]
    assert [one[0] for one in found if one] == pytest.approx(FIRST_BETAS, abs=1e-4)
    assert {one[1] for one in found if one} == {0.99}
    assert betas_at(scheduler("OneCycle", **CYCLE, cycle_momentum=False), 3) is None
    assert betas_at(scheduler("constant"), 3) is None


def warmed(num_steps: int, decay: Any) -> Any:
    """A linear warm-up, and then a scheduler of torch."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        warmup = schedulers.LambdaLR(optimizer, lambda step: min(1.0, step / num_steps))
        return schedulers.SequentialLR(optimizer, [warmup, decay(optimizer)], milestones=[num_steps])

    return make


OURS: list[tuple[str, dict[str, Any], Any]] = [
    ("constant", {"warmup_num_steps": 5}, warmed(5, partial(schedulers.ConstantLR, factor=1.0))),
    (
        "linear",
        {"total_num_steps": 7, "min_ratio": 0.25},
        partial(schedulers.LinearLR, start_factor=1.0, end_factor=0.25, total_iters=7),
    ),
    (
        "cosine",
        {"total_num_steps": 9, "min_ratio": 0.3},
        partial(schedulers.CosineAnnealingLR, T_max=9, eta_min=0.3 * BASE),
    ),
    (
        "linear",
        {"warmup_num_steps": 4, "total_num_steps": 10},
        warmed(4, partial(schedulers.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=6)),
    ),
    (
        "cosine",
        {"warmup_num_steps": 4, "total_num_steps": 10},
        warmed(4, partial(schedulers.CosineAnnealingLR, T_max=6)),
    ),
]
TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [2, 2, 5], "gamma": 0.5}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.01}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2, "eta_min": 0.01}),
    ("CosineAnnealingWarmRestarts", {"T_0": 1, "T_mult": 3}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 0.5, "end_factor": 0.2, "total_iters": 4}),
    ("ConstantLR", {"total_iters": 3}),
    ("PolynomialLR", {"total_iters": 6, "power": 2.0}),
]


@pytest.mark.parametrize(
    ("kind", "params", "make"),
    [*OURS, *((kind, params, partial(getattr(schedulers, kind), **params)) for kind, params in TORCHS)],
)
def test_rates_are_those_of_torch(kind: str, params: dict[str, Any], make: Any) -> None:
    steps = 14 if kind in dict(TORCHS) else 10
    assert rates(kind, steps, **params) == pytest.approx(torch_rates(make, steps), rel=1e-9, abs=1e-12)


def test_a_skipped_update_does_not_move_the_learning_rate() -> None:
    config = {
        "scheduler": {"type": "constant", "params": {"warmup_num_steps": 4}},
        "optimizer": SGD,
        "fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1},
    }
    found = train(Case(models.mlp, models.vector_batch, accumulation=2, steps=6, config=config))
    assert found.skipped[:2] == [True, True] and found.skipped[-3:] == [False] * 3
    taken = 0
    for lr, skipped in zip(found.lrs, found.skipped, strict=True):
        assert lr == pytest.approx(BASE * min(1.0, taken / 4))
        taken += not skipped


STEPS = 6
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
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
    return MOMENTUM([{"params": weights, "lr": 2e-2}, {"params": biases, "weight_decay": 0.1}])


def moved(optimizer: torch.optim.Optimizer) -> list[float]:
    """What a scheduler may move."""
    groups = optimizer.param_groups
    return [value for group in groups for value in (group["lr"], *group.get("betas", [group.get("momentum")]))]


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp()


def train_beside_torch(make: Callable[[Any], Any], way: str) -> None:
    """Losses, options of each step and final values are those of plain torch."""
    chosen: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"of the config": adamw, "a callable": MOMENTUM}
    choose = chosen.get(way, two_groups)
    plain, model = seeded(), seeded()
    optimizer, given = choose(plain.parameters()), choose(model.parameters())
    expected: Any = make(optimizer)
    scheduler: Any = None
    if way == "of the config":
        engine = lowtide.initialize(model, {**QUIET, "optimizer": ADAMW}, lr_scheduler=make)
    elif way == "a callable":
        engine = lowtide.initialize(model, QUIET, optimizer=MOMENTUM, lr_scheduler=make)
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


WAYS = ("of the config", "a callable", "an object", "by hand", "by hand over the caller's")


@pytest.mark.parametrize(("name", "way"), list(zip(MAKERS, cycle(WAYS), strict=False)))
def test_a_scheduler_of_torch_does_what_it_does_in_torch(name: str, way: str) -> None:
    train_beside_torch(MAKERS[name], way)


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
    "AdamW: its rates would have no effect",
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
                "with a step() without arguments, ",
                " found ReduceLROnPlateau: its step() needs 'metrics'; make it with engine.optimizer after "
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


MOVING_CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_min_mom": 0.7}
BETAS = [(0.7, 0.99), (0.8, 0.99), (0.7, 0.99), (0.8, 0.99), (0.9, 0.99)]  # as DeepSpeed 0.19.8 sets them
RATES = [0.01, 0.055, 0.1, 0.055, 0.01]
SUM = {"gradient_allreduce_op": "sum", "optimizer": {"type": "sgd", "params": {"lr": 0.01}}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


class CycledAdamW(torch.optim.AdamW):
    """AdamW whose options are those of DeepSpeed's OneCycle."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, weight_decay=0.1)
        self._options = iter(zip(RATES, BETAS, strict=True))

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"], self.param_groups[0]["betas"] = next(self._options)
        return super().step(closure)


def summed_sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """On gradients that are added up over two ranks."""
    return torch.optim.SGD(params, lr=2 * 0.01)


class Autocast(models.TinyGPT):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, targets)


def test_a_cycle_moves_rate_and_betas() -> None:
    scheduler = {"type": "OneCycle", "params": MOVING_CYCLE}
    config = {"scheduler": scheduler, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}
    case = Case(models.mlp_float64, models.vector_batch_float64, steps=5, config=config)
    outcome, expected = train(case), train_plainly(case, 1, CycledAdamW)
    assert outcome.lrs == pytest.approx(RATES)
    torch.testing.assert_close(outcome.state, expected.state, rtol=1e-9, atol=1e-12)


def test_gradients_are_added_up_over_ranks(ranks: RankPool) -> None:
    case = Case(models.mlp_float64, models.vector_batch_float64, steps=2, config=SUM)
    prescaled, accumulated = case.at(3, config={"prescale_gradients": True}), case.at(2, accumulation=2)
    *outcomes, last = ranks(2, train_all, [case, prescaled, accumulated])[0]
    expected = train_plainly(case, 2, summed_sgd)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(outcome.norms, [2 * norm for norm in expected.norms], rtol=1e-9, atol=0)
    again = train_plainly(accumulated, 2, summed_sgd)
    torch.testing.assert_close(last.losses, again.losses, rtol=1e-9, atol=0)


def test_autocast_is_torchs_around_each_forward(ranks: RankPool) -> None:
    case = Case(models.tiny_gpt, models.token_batch, steps=2, config=AUTOCAST)
    recomputed = case.at(3, config={"activation_checkpointing": {"every": 1}})
    outcomes = ranks(2, train_all, [case, recomputed])[0]
    expected = train_plainly(case.at(0, build=Autocast), 2)
    assert all(outcome.differences(outcomes[0]) == [] for outcome in outcomes)
    torch.testing.assert_close(outcomes[0].losses, expected.losses, rtol=2e-3, atol=0)
    assert outcomes[0].losses != train_plainly(case, 2).losses
