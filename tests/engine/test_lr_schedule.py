"""Schedules of the config against closed forms, torch's schedulers and DeepSpeed's values, and in a training."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from lowtide.engine.config.config import Config
from lowtide.engine.config.scheduler import SchedulerConfig
from lowtide.engine.step.lr_schedule import betas_at, schedule_of
from tests.kit import models
from tests.kit.training import Case, Scheduled, train, train_plainly

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
        ("WarmupLR", {"warmup_num_steps": 1}, of_base(0, 0, 1, 1)),
        ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, of_base(0, 0, 0.5, 1, 1)),
        ("WarmupDecayLR", UP_AND_DOWN, of_base(*TRIANGLE)),
        ("WarmupDecayLR", {**UP_AND_DOWN, "warmup_max_lr": "auto"}, of_base(*TRIANGLE)),
        ("WarmupDecayLR", {**UP_AND_DOWN, "warmup_max_lr": 0.5}, [0.5 * factor for factor in TRIANGLE]),
        (
            "WarmupCosineLR",
            {**UP_AND_DOWN, "warmup_min_ratio": 0.2},
            of_base(0.2, 0.2, 0.4, 0.6, 0.8, *COSINE, *[1e-4] * 5),
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


def test_type_names_are_found_without_regard_to_case() -> None:
    assert scheduler("warmuplr").type == "WarmupLR" and scheduler("Constant").type == "constant"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_training_has_the_rate_of_each_update(stage: int) -> None:
    section = {"type": "linear", "params": {"warmup_num_steps": 2, "total_num_steps": 6, "min_ratio": 0.1}}
    config = {"scheduler": section, "optimizer": SGD}
    case = Case(models.mlp_float64, models.vector_batch_float64, stage, accumulation=2, steps=8, config=config)

    def ratio(step: int) -> float:
        return step / 2 if step < 2 else 0.1 + 0.9 * max(0.0, 1 - (step - 2) / 4)

    def make_optimizer(params: Any) -> Any:
        return Scheduled(torch.optim.SGD(params, lr=BASE), lambda optimizer: schedulers.LambdaLR(optimizer, ratio))

    found, expected = train(case), train_plainly(case, 1, make_optimizer)
    assert found.lrs == pytest.approx(of_base(*map(ratio, range(8))), rel=1e-12, abs=1e-15)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)


def test_a_skipped_update_does_not_move_the_learning_rate() -> None:
    config = {
        "scheduler": {"type": "constant", "params": {"warmup_num_steps": 4}},
        "optimizer": SGD,
        "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1},
    }
    found = train(Case(models.mlp, models.vector_batch, steps=6, config=config))
    assert found.skipped[:2] == [True, True] and found.skipped[-3:] == [False] * 3
    taken = 0
    for lr, skipped in zip(found.lrs, found.skipped, strict=True):
        assert lr == pytest.approx(BASE * min(1.0, taken / 4))
        taken += not skipped
