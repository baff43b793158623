"""Learning rates against closed forms and against torch's schedulers."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.scheduler import SchedulerConfig
from lowtide.engine.step.lr_schedule import betas_at, schedule_of

BASE = 0.1


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


def test_warmup_lr_is_logarithmic_unless_told_and_ends_at_the_optimizers_rate() -> None:
    found = rates("WarmupLR", 8, warmup_num_steps=5)
    expected = [0.0] + [BASE * math.log(i + 1) / math.log(5) for i in range(5)] + [BASE, BASE]
    assert found == pytest.approx(expected, abs=1e-15)


def test_warmup_lr_linear_goes_from_its_minimum_to_its_maximum() -> None:
    found = rates("WarmupLR", 7, warmup_num_steps=4, warmup_type="linear", warmup_min_lr=0.2, warmup_max_lr=1.0)
    assert found == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_the_first_two_updates_use_the_first_iteration_as_in_deepspeed() -> None:
    first, second, third = rates("WarmupLR", 3, warmup_num_steps=10, warmup_min_lr=0.01)
    assert first == second == 0.01 < third


def test_a_warmup_of_one_step_is_taken_as_two() -> None:
    for curve in ("log", "linear"):
        one = rates("WarmupLR", 6, warmup_num_steps=1, warmup_type=curve)
        assert one == rates("WarmupLR", 6, warmup_num_steps=2, warmup_type=curve)


def test_warmup_decay_lr_falls_to_zero_and_stays() -> None:
    found = rates("WarmupDecayLR", 12, warmup_num_steps=4, total_num_steps=8, warmup_type="linear")
    expected = [0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0, 0]
    assert found == pytest.approx([BASE * factor for factor in expected])
    stated = rates("WarmupDecayLR", 12, warmup_num_steps=4, total_num_steps=8, warmup_type="linear", warmup_max_lr=0.5)
    assert stated == pytest.approx([0.5 * factor for factor in expected])


def test_warmup_decay_lr_with_auto_peaks_at_the_optimizers_rate() -> None:
    found = rates("WarmupDecayLR", 12, warmup_num_steps=4, total_num_steps=8, warmup_max_lr="auto")
    assert max(found) == pytest.approx(BASE)


def test_warmup_cosine_lr_ends_at_its_minimum_ratio() -> None:
    found = rates(
        "WarmupCosineLR", 14, warmup_num_steps=4, total_num_steps=8, warmup_type="linear", warmup_min_ratio=0.2
    )
    warm = [0.2, 0.2, 0.4, 0.6, 0.8]
    decay = [1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert found == pytest.approx([BASE * ratio for ratio in warm + decay + [1e-4] * 5])


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR", "linear", "cosine"])
def test_fewer_steps_than_the_warmup_is_no_crash(kind: str) -> None:
    found = rates(kind, 20, warmup_num_steps=10, total_num_steps=5)
    assert all(rate >= 0 for rate in found) and found[15] <= 1e-3 * BASE


def test_constant_without_warmup_is_constant() -> None:
    assert rates("constant", 3) == [BASE] * 3


def test_constant_equals_torch_constant_after_linear_warmup() -> None:
    def make(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))

    assert rates("constant", 9, warmup_num_steps=5) == pytest.approx(torch_rates(make, 9))


def test_linear_equals_torch_linear_lr() -> None:
    def make(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=7)

    assert rates("linear", 10, total_num_steps=7, min_ratio=0.25) == pytest.approx(torch_rates(make, 10))


def test_cosine_equals_torch_cosine_annealing() -> None:
    def make(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.3 * BASE)

    assert rates("cosine", 10, total_num_steps=9, min_ratio=0.3) == pytest.approx(torch_rates(make, 10))


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_warmup_then_decay_equals_torch_sequential(kind: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> object:
        schedulers = torch.optim.lr_scheduler
        warmup = schedulers.LambdaLR(optimizer, lambda step: step / 4)
        decay = (
            schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=6)
            if kind == "linear"
            else schedulers.CosineAnnealingLR(optimizer, T_max=6)
        )
        return schedulers.SequentialLR(optimizer, [warmup, decay], milestones=[4])

    assert rates(kind, 10, warmup_num_steps=4, total_num_steps=10) == pytest.approx(torch_rates(make, 10))


LATE = [0.1, 0.1, 0.1, 0.55, 0.55, 1.0, 0.7, 0.4, 0.4, 0.1, 0.1]
FIRST_BETAS = [0.7, 0.85, 0.8, 0.75, 0.7, 0.7333, 0.7667, 0.8, 0.8333, 0.8667, 0.9, 0.9045]
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
DECAYING = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01, "cycle_min_mom": 0.7}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [  # what DeepSpeed 0.19.8 sets before each update
        (
            "OneCycle",
            {**CYCLE, **DECAYING, "cycle_first_step_size": 4, "cycle_second_step_size": 6},
            [0.1, 0.325, 0.55, 0.775, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.08, 0.066667, 0.057143],
        ),
        (
            "OneCycle",
            {**CYCLE, "cycle_first_step_size": 5, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3},
            LATE,
        ),
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


@pytest.mark.parametrize(
    ("kind", "params"),
    [
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
    ],
)
def test_types_of_torch_are_torchs(kind: str, params: dict[str, Any]) -> None:
    make = partial(getattr(torch.optim.lr_scheduler, kind), **params)
    assert rates(kind, 14, **params) == pytest.approx(torch_rates(make, 14), rel=1e-9, abs=1e-12)


def test_type_names_are_found_without_regard_to_case() -> None:
    assert scheduler("warmuplr").type == "WarmupLR" and scheduler("Constant").type == "constant"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"type": "LambdaLR"},
            '"LambdaLR" is not supported yet: it needs a function; there is WarmupLR, WarmupDecayLR, ',
        ),
        ({"type": "ReduceLROnPlateau"}, "or pass your own lr_scheduler to initialize"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 1}}, "scheduler.params.cycle_max_lr: must be given"),
        ({"type": "cosin"}, 'unknown scheduler "cosin"; did you mean "cosine"?; there is'),
        ({"params": {}}, "scheduler.type: expected one of WarmupLR, "),
        ({"tipe": "cosine"}, 'scheduler.tipe: unknown key "tipe"; did you mean "type"?'),
        ({"type": 1}, "PolynomialLR, found 1"),
        ({"type": "cosine"}, "scheduler.params.total_num_steps: must be given: it has no default"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            'scheduler.params.total_num_steps: "auto" has no meaning for this key here; '
            "write the number of optimizer steps of the training",
        ),
        ({"type": "WarmupLR", "params": {"warmup_type": "exp"}}, 'expected "log" or "linear", found "exp"'),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, 'did you mean "warmup_num_steps"?'),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "expected at least 1, found 0"),
    ],
)
def test_each_fault_of_the_section_has_its_text(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"scheduler": section})
    assert expected in str(caught.value)
