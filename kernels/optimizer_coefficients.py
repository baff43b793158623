"""What an optimizer's options come to in one step: the numbers that the C++ and the Triton kernel compute with.

Computed in float64 on the host and rounded once to float32, in the order in which the kernels name them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

Options = Mapping[str, Any]

MAX_COEFFICIENTS = 8


def _lerp_coefficients(weight: float) -> tuple[float, float]:
    """What makes a + weight * (b - a), and whether b and not a is added to: as torch.lerp, from the nearer end."""
    narrow = ctypes.c_float(weight).value
    return (narrow, 0.0) if narrow < 0.5 else (narrow - 1, 1.0)


def _adam_coefficients(options: Options, step: int, decay: float) -> tuple[float, ...]:
    beta1, beta2 = options["betas"]
    step_size = float(options["lr"]) / (1 - beta1**step)
    correction = math.sqrt(1 - beta2**step)
    return (decay, *_lerp_coefficients(1 - beta1), beta2, 1 - beta2, correction, options["eps"], -step_size)


def _adamw(options: Options, step: int) -> tuple[float, ...]:
    return _adam_coefficients(options, step, 1 - float(options["lr"]) * options["weight_decay"])


def _adam(options: Options, step: int) -> tuple[float, ...]:
    return _adam_coefficients(options, step, options["weight_decay"])


def _lion(options: Options, step: int) -> tuple[float, ...]:
    beta1, beta2 = options["betas"]
    lr = float(options["lr"])
    return (1 - lr * options["weight_decay"], *_lerp_coefficients(beta1), *_lerp_coefficients(1 - beta2), -lr)


def _adagrad(options: Options, step: int) -> tuple[float, ...]:
    step_size = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
    return (options["weight_decay"], step_size, options["eps"])


def _sgd(options: Options, step: int) -> tuple[float, ...]:
    return (options["weight_decay"], -float(options["lr"]))


def _momentum(options: Options, step: int) -> tuple[float, ...]:
    """As torch: the first gradient starts the buffer as it is."""
    momentum = options["momentum"]
    if not momentum:
        of_buffer, shares = (0.0, 1.0), (1.0, 0.0)
    else:
        of_buffer = (0.0, 1.0) if step == 1 else (momentum, 1 - options["dampening"])
        shares = (1.0, momentum) if options["nesterov"] else (0.0, 1.0)
    return (*_sgd(options, step), *of_buffer, *shares)


COEFFICIENTS: Mapping[tuple[str, int], Callable[[Options, int], tuple[float, ...]]] = {
    ("adamw", 2): _adamw,
    ("adam", 2): _adam,
    ("lion", 1): _lion,
    ("adagrad", 1): _adagrad,
    ("sgd", 0): _sgd,
    ("sgd", 1): _momentum,
}
"""(name, number of states) of a rule -> its coefficients in a step, which counts from 1; at most MAX_COEFFICIENTS."""
