"""SGD and other elementwise rules: Lion, Adagrad, RMSprop and Adadelta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..configs.section import Bool, Float, Key, NonNegative
from .optimizer import DECAY, L2, STATE_DTYPE, Beta, Betas, Optimizer, Options, State, epsilon, lerp_coefficients, rate

if TYPE_CHECKING:
    from torch import Tensor

_Share = Annotated[NonNegative, Field(le=1)]
_MOMENTUM: Key = (NonNegative, 0.0, "Momentum factor.")


# SGD, with or without momentum, as torch has it.


def _sgd_conflicts(params: Any) -> list[tuple[str, str]]:
    if not params.nesterov or (params.momentum != 0 and params.dampening == 0):
        return []
    found = f"found momentum {params.momentum} and dampening {params.dampening}"
    return [("nesterov", f"needs momentum above 0 and dampening 0, {found}")]


def _sgd(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    import torch

    torch._fused_sgd_(
        [weight],
        [gradient],
        # Momentum may have been set to 0 after the buffer was made.
        list(states) if options["momentum"] else [],
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        lr=options["lr"],
        dampening=options["dampening"],
        nesterov=options["nesterov"],
        maximize=False,
        # torch copies the first gradient into the buffer, without dampening.
        is_first_step=int(step) == 1,
    )


def _sgd_coefficients(options: Options, step: int) -> tuple[float, ...]:
    """decay, -lr, and with momentum: momentum, 1 - dampening, share of the gradient, share of the buffer.

    As in torch, the first gradient starts the buffer unscaled, and a momentum of 0 leaves the buffer as it is.
    """
    momentum = options["momentum"]
    if not momentum:
        of_buffer, shares = (1.0, 0.0), (1.0, 0.0)
    else:
        of_buffer = (0.0, 1.0) if step == 1 else (momentum, 1 - options["dampening"])
        shares = (1.0, momentum) if options["nesterov"] else (0.0, 1.0)
    return (options["weight_decay"], -float(options["lr"]), *of_buffer, *shares)


SGD = Optimizer(
    title="SGD",
    text="Keyword arguments of SGD. Source: torch.optim.SGD.",
    keys={
        "lr": rate(1e-3),
        "momentum": _MOMENTUM,
        "dampening": (Float, 0.0, "Dampening of the momentum."),
        "weight_decay": L2,
        "nesterov": (Bool, False, "Nesterov momentum. Needs momentum above 0 and dampening 0."),
        "state_dtype": STATE_DTYPE,
    },
    conflicts=_sgd_conflicts,
    states=(State("momentum_buffer", needed_option="momentum"),),
    apply=_sgd,
    coefficients=_sgd_coefficients,
    # The buffer keeps its value: momentum 1, and no share of the gradient.
    idle=(0.0, 0.0, 1.0, 0.0, 0.0, 0.0),
    keeps_step=False,
    torch_class="SGD",
)


# Lion: steps of equal size, in the sign of a mean of gradients. Source: arXiv 2302.06675, program 1.


def _lion(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """w -= lr * (sign(beta1 m + (1 - beta1) g) + decay w);  m = beta2 m + (1 - beta2) g."""
    beta1, beta2 = options["betas"]
    momentum = states[0]
    weight.mul_(1 - options["lr"] * options["weight_decay"])
    weight.add_(gradient.lerp(momentum, beta1).sign_(), alpha=-options["lr"])
    momentum.lerp_(gradient, 1 - beta2)


def _lion_coefficients(options: Options, step: int) -> tuple[float, ...]:
    """decay, lerp of the direction (2), lerp of m (2), -lr."""
    beta1, beta2 = options["betas"]
    lr = float(options["lr"])
    return (1 - lr * options["weight_decay"], *lerp_coefficients(beta1), *lerp_coefficients(1 - beta2), -lr)


LION = Optimizer(
    title="Lion",
    text="Keyword arguments of Lion, with the defaults of the paper (torch has none). Source: arXiv 2302.06675.",
    keys={
        "lr": rate(1e-4),
        "betas": (Betas, (0.9, 0.99), "Mixing factor of the update, and decay of the momentum."),
        "weight_decay": DECAY,
        "state_dtype": STATE_DTYPE,
    },
    states=(State("exp_avg"),),
    apply=_lion,
    coefficients=_lion_coefficients,
    idle=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    keeps_step=False,
    deepspeed_names=("fusedlion", "cpulion", "deepspeedcpulion"),
    deepspeed_defaults={"lr": 1e-3, "betas": (0.9, 0.999)},
)


# Adagrad: gradients over the root of the sum of all their squares. Source: Duchi et al., JMLR 12, 2011.


def _adagrad(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    import torch

    torch._fused_adagrad_(
        [weight],
        [gradient],
        [states[0]],
        [step],
        lr=options["lr"],
        lr_decay=options["lr_decay"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


def _adagrad_coefficients(options: Options, step: int) -> tuple[float, ...]:
    """decay, step size, eps."""
    # As torch: the first step has no decay.
    step_size = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
    return (options["weight_decay"], step_size, options["eps"])


ADAGRAD = Optimizer(
    title="Adagrad",
    text="Keyword arguments of Adagrad. Source: torch.optim.Adagrad.",
    keys={
        "lr": rate(1e-2),
        "lr_decay": (NonNegative, 0.0, "Decay of the learning rate with the step."),
        "weight_decay": L2,
        "initial_accumulator_value": (NonNegative, 0.0, "Start value of the sum of squares."),
        "eps": epsilon(1e-10),
        "state_dtype": STATE_DTYPE,
    },
    states=(State("sum", is_mean_of_squares=True, start_option="initial_accumulator_value"),),
    apply=_adagrad,
    coefficients=_adagrad_coefficients,
    # eps is 1, since 0 / (sqrt(0) + 0) would be NaN.
    idle=(0.0, 0.0, 1.0),
    torch_class="Adagrad",
    deepspeed_names=("cpuadagrad", "deepspeedcpuadagrad"),
)


# RMSprop: gradients over the root of a running mean of their squares, as torch has it.


def _rmsprop_conflicts(params: Any) -> list[tuple[str, str]]:
    if not params.centered or params.state_dtype == "fp32":
        return []
    # The variance E[g^2] - E[g]^2 of rounded means may be negative, and its root a NaN.
    return [("centered", f'needs state_dtype "fp32", found "{params.state_dtype}"')]


def _rmsprop(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    keep, squares = options["alpha"], states[0]
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    squares.mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
    if options["centered"]:
        mean = states[-1].lerp_(gradient, 1 - keep)
        # Not in place: the state stays the mean of squares, and this is E[g^2] - E[g]^2.
        squares = squares.addcmul(mean, mean, value=-1)
    root = squares.sqrt().add_(options["eps"])
    # Not by the number of states: a buffer stays if momentum is set to 0 later.
    if options["momentum"]:
        buffer = states[1].mul_(options["momentum"]).addcdiv_(gradient, root)
        weight.add_(buffer, alpha=-options["lr"])
    else:
        weight.addcdiv_(gradient, root, value=-options["lr"])


RMSPROP = Optimizer(
    title="RMSprop",
    text="Keyword arguments of RMSprop. Source: torch.optim.RMSprop.",
    keys={
        "lr": rate(1e-2),
        "alpha": (Beta, 0.99, "Decay of the running mean of squares."),
        "eps": epsilon(1e-8),
        "weight_decay": L2,
        "momentum": _MOMENTUM,
        "centered": (
            Bool,
            False,
            "Whether the squares are of the gradient's distance from its mean. Needs state_dtype fp32.",
        ),
        "state_dtype": STATE_DTYPE,
    },
    conflicts=_rmsprop_conflicts,
    states=(
        State("square_avg", is_mean_of_squares=True),
        State("momentum_buffer", needed_option="momentum"),
        State("grad_avg", needed_option="centered"),
    ),
    apply=_rmsprop,
)


# Adadelta: steps as large as those before them. Source: arXiv 1212.5701.


def _adadelta(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    squares, steps = states
    keep, eps = options["rho"], options["eps"]
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    squares.mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
    change = steps.add(eps).sqrt_().div_(squares.add(eps).sqrt_()).mul_(gradient)
    # After its use above: algorithm 1 scales a step by the mean of earlier steps.
    steps.mul_(keep).addcmul_(change, change, value=1 - keep)
    weight.add_(change, alpha=-options["lr"])


ADADELTA = Optimizer(
    title="Adadelta",
    text="Keyword arguments of Adadelta. Source: torch.optim.Adadelta.",
    keys={
        "lr": (NonNegative, 1.0, "Factor of each step."),
        "rho": (_Share, 0.9, "Decay of both running means of squares."),
        "eps": epsilon(1e-6, "Added to both before their roots are taken."),
        "weight_decay": L2,
        "state_dtype": STATE_DTYPE,
    },
    states=(State("square_avg", is_mean_of_squares=True), State("acc_delta", is_mean_of_squares=True)),
    apply=_adadelta,
)
