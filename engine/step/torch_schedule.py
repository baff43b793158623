"""Formulas of torch's schedulers as a factor or a rate of t: optimizer steps already taken.

Source: torch.optim.lr_scheduler, in the closed forms of its documentation.
"""

import math

from ..config.torch_schedulers import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
    TorchScheduler,
)


def torch_rate(scheduler: TorchScheduler, base_lr: float, step: int) -> float:
    """The learning rate of the update after `step` updates."""
    if isinstance(scheduler, CosineAnnealingLR):
        return _cosine(base_lr, scheduler.params.eta_min, step / scheduler.params.T_max)
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        return _cosine(base_lr, scheduler.params.eta_min, _place_in_period(scheduler, step))
    return base_lr * _factor(scheduler, step)


def _cosine(base_lr: float, eta_min: float, share: float) -> float:
    """eta_min + (base - eta_min) x (1 + cos(pi x share)) / 2."""
    return eta_min + (base_lr - eta_min) * (1 + math.cos(math.pi * share)) / 2


def _place_in_period(scheduler: CosineAnnealingWarmRestarts, step: int) -> float:
    length, times = scheduler.params.T_0, scheduler.params.T_mult
    if times == 1:
        return step % length / length
    while step >= length:
        step, length = step - length, length * times
    return step / length


def _factor(scheduler: StepLR | MultiStepLR | ExponentialLR | LinearLR | ConstantLR | PolynomialLR, step: int) -> float:
    if isinstance(scheduler, StepLR):
        return float(scheduler.params.gamma ** (step // scheduler.params.step_size))
    if isinstance(scheduler, MultiStepLR):
        passed = sum(milestone <= step for milestone in scheduler.params.milestones)
        return float(scheduler.params.gamma**passed)
    if isinstance(scheduler, ExponentialLR):
        return float(scheduler.params.gamma**step)
    if isinstance(scheduler, LinearLR):
        start, end, total = scheduler.params.start_factor, scheduler.params.end_factor, scheduler.params.total_iters
        return start + (end - start) * min(step, total) / total
    if isinstance(scheduler, ConstantLR):
        return scheduler.params.factor if step < scheduler.params.total_iters else 1.0
    total = scheduler.params.total_iters
    return float((1 - min(step, total) / total) ** scheduler.params.power)
