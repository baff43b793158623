"""Adam and its variants: a step is a mean of gradients over the root of a mean of their squares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_float
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ..configs.section import Bool, Key, Natural, NonNegative
from .optimizer import (
    CORRECTED,
    DECAY,
    L2,
    STATE_DTYPE,
    Apply,
    Betas,
    Coefficients,
    Optimizer,
    Options,
    State,
    epsilon,
    lerp_coefficients,
    rate,
)

if TYPE_CHECKING:
    from torch import Tensor


_Float32 = Literal["fp32"]
MOMENT_KEYS: Mapping[str, Key] = {  # of Adam and its variants
    "lr": rate(1e-3),
    "betas": (Betas, (0.9, 0.999), "Decay of the running mean of the gradient and of its square."),
    "eps": epsilon(1e-8),
    "weight_decay": L2,
    "state_dtype": STATE_DTYPE,
}


# Adam, with decoupled decay (AdamW) or decay in the gradient. Sources: arXiv 1412.6980 and 1711.05101.


def _apply(decoupled: bool) -> Apply:
    def apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
        import torch

        # float64, and machines without a kernel, run this: torch's fused step passes over memory once.
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        beta1, beta2 = options["betas"]
        if not options.get("bias_correction", True):
            step = torch.full_like(step, math.inf)  # at infinity the correction is 1
        fused(
            [weight],
            [gradient],
            [states[0]],
            [states[1]],
            [],
            [step],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )

    return apply


def _coefficients(decoupled: bool) -> Coefficients:
    def coefficients(options: Options, step: int) -> tuple[float, ...]:
        """decay, lerp of m (2), beta2, 1 - beta2, sqrt(correction2), eps, -step size."""
        beta1, beta2 = options["betas"]
        lr, is_corrected = float(options["lr"]), options.get("bias_correction", True)
        decay = 1 - lr * options["weight_decay"] if decoupled else options["weight_decay"]
        step_size = lr / (1 - beta1**step if is_corrected else 1.0)
        correction = math.sqrt(1 - beta2**step) if is_corrected else 1.0
        return (decay, *lerp_coefficients(1 - beta1), beta2, 1 - beta2, correction, options["eps"], -step_size)

    return coefficients


# (0, 0): the mean keeps its value. eps is 1, since 0 / (sqrt(0) + 0) would be NaN, and NaN times a step of 0 too.
_IDLE_MOMENTS = (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
_DECOUPLED: Key = (Bool, False, "Whether the decay is apart from the gradient, as in AdamW.")
_MOMENTS = (State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True))

ADAMW = Optimizer(
    title="AdamW",
    text="Keyword arguments of AdamW (decay apart from the gradient). Source: torch.optim.AdamW.",
    keys={**MOMENT_KEYS, "weight_decay": (NonNegative, 1e-2, DECAY[2]), "bias_correction": CORRECTED},
    states=_MOMENTS,
    apply=_apply(decoupled=True),
    coefficients=_coefficients(decoupled=True),
    # AdamW's decay is a factor of the weight, Adam's an addend of the gradient.
    idle=(1.0, *_IDLE_MOMENTS),
    torch_class="AdamW",
    torch_options={"decoupled_weight_decay": True},
    deepspeed_names=("fusedadamw", "cpuadamw"),
    deepspeed_defaults={"weight_decay": 0.0},
)
ADAM = Optimizer(
    title="Adam",
    text="Keyword arguments of Adam (decay added to the gradient). Source: torch.optim.Adam.",
    keys={**MOMENT_KEYS, "bias_correction": CORRECTED},
    states=_MOMENTS,
    apply=_apply(decoupled=False),
    coefficients=_coefficients(decoupled=False),
    idle=(0.0, *_IDLE_MOMENTS),
    torch_class="Adam",
    torch_options={"decoupled_weight_decay": False},
    deepspeed_names=("fusedadam", "cpuadam", "deepspeedcpuadam"),
)


# Adamax: Adam with the largest gradient in place of the root. Source: arXiv 1412.6980, section 7.


def _adamax(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    import torch

    beta1, beta2 = options["betas"]
    mean, largest = states
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    largest.copy_(torch.maximum(largest.mul_(beta2), gradient.abs().add_(options["eps"])))
    weight.addcdiv_(mean, largest, value=-options["lr"] / (1 - beta1 ** int(step)))


ADAMAX = Optimizer(
    title="Adamax",
    text="Keyword arguments of Adamax. Source: torch.optim.Adamax.",
    keys={
        **MOMENT_KEYS,
        "lr": rate(2e-3),
        "betas": (Betas, (0.9, 0.999), "Decay of the running mean of the gradient and of its maximum."),
        "eps": epsilon(1e-8, "Added to the size of a gradient."),
        "state_dtype": STATE_DTYPE,
    },
    # No mean of squares, but likewise never negative and a divisor: see `State`.
    states=(State("exp_avg"), State("exp_inf", is_mean_of_squares=True)),
    apply=_adamax,
)


def _decayed(weight: Tensor, gradient: Tensor, options: Options) -> Tensor:
    """Apply the decay to the weight, or return the gradient with the decay added."""
    if options["decoupled_weight_decay"]:
        weight.mul_(1 - options["lr"] * options["weight_decay"])
        return gradient
    return gradient.add(weight, alpha=options["weight_decay"])


# NAdam: Adam with Nesterov momentum. Source: Dozat, ICLR 2016 workshop, as torch has it.


def _momentum(beta1: float, decay: float, step: int) -> float:
    """mu_t = beta1 x (1 - 0.96^(t x decay) / 2)."""
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * decay)))


# All shards of a step ask for the same product.
@lru_cache(maxsize=8)
def _momentum_product(beta1: float, decay: float, step: int) -> float:
    """mu_1 x ... x mu_t, in float32 as torch keeps it as a state."""
    product = 1.0
    for earlier in range(1, step + 1):
        product = c_float(product * c_float(_momentum(beta1, decay, earlier)).value).value
        # The product underflows: with the defaults after 132 steps, so the loop stays short.
        if product == 0.0:
            break
    return product


def _nadam(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    (beta1, beta2), decay, at = options["betas"], options["momentum_decay"], int(step)
    mean, squares = states
    gradient = _decayed(weight, gradient, options)
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = squares.div(1 - beta2**at).sqrt_().add_(options["eps"])
    now, then = _momentum(beta1, decay, at), _momentum(beta1, decay, at + 1)
    product = _momentum_product(beta1, decay, at)
    weight.addcdiv_(gradient, root, value=-options["lr"] * (1 - now) / (1 - product))
    weight.addcdiv_(mean, root, value=-options["lr"] * then / (1 - product * then))


NADAM = Optimizer(
    title="NAdam",
    text="Keyword arguments of NAdam. Source: torch.optim.NAdam.",
    keys={
        **MOMENT_KEYS,
        "lr": rate(2e-3),
        "momentum_decay": (NonNegative, 4e-3, "Decay of the momentum with the step."),
        "decoupled_weight_decay": _DECOUPLED,
    },
    states=_MOMENTS,
    apply=_nadam,
)


# RAdam: Adam that adapts only once the variance of its step is known. Source: arXiv 1908.03265.


def _rectification(beta2: float, step: int) -> float | None:
    """Return the factor of an adaptive step; None while its variance is unknown."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / (1 - beta2**step)
    # The paper adapts from 4 on, torch from 5 on.
    if rho <= 5:
        return None
    return math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))


def _radam(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    (beta1, beta2), at = options["betas"], int(step)
    mean, squares = states
    gradient = _decayed(weight, gradient, options)
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step_size = options["lr"] / (1 - beta1**at)
    rectified = _rectification(beta2, at)
    if rectified is None:
        weight.add_(mean, alpha=-step_size)
        return
    # torch adds eps before the correction of the second moment here, after it in Adam.
    root = squares.sqrt().add_(options["eps"])
    weight.addcdiv_(mean, root, value=-step_size * rectified * math.sqrt(1 - beta2**at))


RADAM = Optimizer(
    title="RAdam",
    text="Keyword arguments of RAdam. Source: torch.optim.RAdam.",
    keys={**MOMENT_KEYS, "decoupled_weight_decay": _DECOUPLED},
    states=_MOMENTS,
    apply=_radam,
)


# 1-bit Adam: ranks send a bit for each element. Source: arXiv 2102.02888. Defaults are DeepSpeed's, and like
# DeepSpeed's its moments are not corrected in the first steps.


def onebit_direction(weight: Tensor, mean: Tensor, squares: Tensor, options: Options) -> Tensor:
    """m / (sqrt(v) + eps) + decay w. Elements without a second moment from the warm-up do not move."""
    found = (mean / squares.sqrt().add_(options["eps"])).masked_fill_(squares == 0, 0.0)
    return found.add_(weight, alpha=options["weight_decay"]) if options["weight_decay"] else found


def _onebit_adam(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """A step of the warm-up."""
    (beta1, beta2), (mean, squares) = options["betas"], states
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.add_(onebit_direction(weight, mean, squares, options), alpha=-float(options["lr"]))


ONEBIT_ADAM = Optimizer(
    title="OneBitAdam",
    text="Keyword arguments of 1-bit Adam. Source: arXiv 2102.02888.",
    keys={
        **MOMENT_KEYS,
        "weight_decay": DECAY,
        "state_dtype": (_Float32, "fp32", STATE_DTYPE[2]),
        "freeze_step": (
            Natural,
            100_000,
            "Steps of the warm-up with Adam. After it the second moment is frozen, and ranks send signs of momenta.",
        ),
    },
    states=_MOMENTS,
    apply=_onebit_adam,
    sends_signs=True,
    keeps_step=False,
)
