"""Optimizers whose steps need whole parameters: LAMB, Muon and Adafactor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..configs.section import Bool, Float, NonNegative, Positive
from .adam import ADAMW, MOMENT_KEYS
from .optimizer import (
    CORRECTED,
    DECAY,
    STATE_DTYPE,
    Beta,
    Betas,
    Optimizer,
    Options,
    State,
    StateDtype,
    WholeTensorRule,
    epsilon,
)

if TYPE_CHECKING:
    from torch import Tensor

_OrNull = NonNegative | None
_Bounds = tuple[NonNegative | None, NonNegative]
_AtLeastOne = Annotated[Float, Field(ge=1)]
_NotPositive = Annotated[Float, Field(le=0)]


# LAMB: Adam with steps in proportion to the parameter's norm. Source: arXiv 1904.00962, algorithm 2.


def _lamb_conflicts(params: Any) -> list[tuple[str, str]]:
    if params.min_coeff <= params.max_coeff:
        return []
    return [("min_coeff", f"expected at most max_coeff ({params.max_coeff:g}), found {params.min_coeff:g}")]


def _lamb_direction(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """w = m / c1 / (sqrt(v / c2) + eps) + decay w, with c1 = 1 - beta1^t and c2 = 1 - beta2^t."""
    (beta1, beta2), at = options["betas"], int(step)
    mean, squares = states
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = (1 - beta1**at, 1 - beta2**at) if options["bias_correction"] else (1.0, 1.0)
    root = squares.sqrt().div_(math.sqrt(second)).add_(options["eps"])
    weight.mul_(options["weight_decay"]).addcdiv_(mean, root, value=1 / first)


def _lamb_ratio(options: Options, step: int, numel: int, weight_norm: float, direction_norm: float) -> float:
    # Else a weight of zeros would never move.
    if not weight_norm or not direction_norm:
        return 1.0
    return float(min(max(weight_norm / direction_norm, options["min_coeff"]), options["max_coeff"]))


def _lamb_finish(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    weight.add_(gradient, alpha=-float(options["lr"]) * options["ratio"])


LAMB = Optimizer(
    title="Lamb",
    text="Keyword arguments of LAMB. Source: arXiv 1904.00962; the bounds are DeepSpeed's.",
    keys={
        **MOMENT_KEYS,
        "weight_decay": (NonNegative, 0.0, "Decay of the parameters, added to the step before it is scaled."),
        "bias_correction": CORRECTED,
        "max_coeff": (
            NonNegative,
            10.0,
            "Upper bound of a step's scale, the norm of the parameter over the norm of the step.",
        ),
        "min_coeff": (NonNegative, 0.01, "Lower bound of a step's scale."),
    },
    conflicts=_lamb_conflicts,
    states=(State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True)),
    apply=_lamb_direction,
    whole=WholeTensorRule(finish=_lamb_finish, ratio=_lamb_ratio),
    keeps_step=False,
    deepspeed_names=("fusedlamb",),
)


# Muon: orthogonalised momentum for matrices, AdamW for all other parameters. Source: Keller Jordan, 2024,
# kellerjordan.github.io/posts/muon, and the code of github.com/KellerJordan/Muon, whose coefficients these are.


def _muon_direction(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """m = momentum m + (1 - momentum) g;  w = m, or mixed with g once more."""
    momentum = options["momentum"]
    states[0].lerp_(gradient, 1 - momentum)
    weight.copy_(gradient.lerp(states[0], momentum) if options["nesterov"] else states[0])


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """(rows, columns) -> the same singular vectors, with singular values of about 0.7 to 1.2."""
    # A steep polynomial: it lifts small singular values fast, and lets them end near 1 instead of at 1.
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    # x x^T then has the shorter side.
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):  # x = a x + (b G + c G^2) x with G = x x^T
        gram = x @ x.T
        x = gram.addmm(gram, gram, beta=b, alpha=c).matmul(x).add_(x, alpha=a)
    result: Tensor = x.T if is_tall else x
    return result


def _muon_matrix(direction: Tensor, step: int, options: Options, factors: Mapping[str, Tensor]) -> Tensor:
    rows, columns = direction.shape
    scale: float = max(1.0, rows / max(columns, 1)) ** 0.5  # a matrix may be empty
    return orthogonalised(direction, options["ns_steps"]).mul_(scale)


def _muon_workspace(shape: Sequence[int]) -> int:
    """Two matrices, and two squares of the shorter side."""
    return 2 * math.prod(shape) + 2 * min(shape) ** 2


def _muon_finish(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    lr = float(options["lr"])
    weight.mul_(1 - lr * options["weight_decay"]).add_(gradient, alpha=-lr)


MUON = Optimizer(
    title="Muon",
    text="Keyword arguments of Muon, for matrices, and of the AdamW beside it. Source: github.com/KellerJordan/Muon.",
    keys={
        "lr": (NonNegative, 0.02, "Learning rate of matrices, about the spectral norm of a step."),
        "momentum": (Beta, 0.95, "Decay of the running mean of the gradient."),
        "nesterov": (Bool, True, "Whether the gradient is mixed into the mean once more."),
        "ns_steps": (Positive, 5, "Newton-Schulz iterations of an orthogonalisation."),
        "weight_decay": DECAY,
        "adam_lr": (_OrNull, None, "Learning rate of embeddings, heads and vectors, which AdamW updates. null: `lr`."),
        "betas": (Betas, (0.9, 0.95), "AdamW's decay of the running mean of the gradient and of its square."),
        "eps": epsilon(1e-10, "Added to AdamW's denominator."),
        "state_dtype": STATE_DTYPE,
    },
    states=(
        State("momentum_buffer", needed_option="is_matrix"),
        State("exp_avg", needed_option="is_other"),
        State("exp_avg_sq", needed_option="is_other", is_mean_of_squares=True),
    ),
    apply=_muon_direction,
    whole=WholeTensorRule(finish=_muon_finish, matrix=_muon_matrix, workspace=_muon_workspace, beside=ADAMW),
    keeps_step=False,
)


# Adafactor: second moments of matrices as row and column means. Source: arXiv 1804.04235, in torch.optim's words.
# The formulas of torch.optim.Adafactor differ from the paper in two places: the largest relative step
# is `lr` instead of 0.01, and the first eps bounds the divisor instead of being added to squares.


_EPS = 2.0**-23  # of float32


def _least(options: Options) -> float:
    first = options["eps"][0]
    return _EPS if first is None else float(first)


def _root(mean_of_squares: Tensor, options: Options) -> Tensor:
    return mean_of_squares.clamp(min=_least(options) ** 2).sqrt()


def _adafactor_direction(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options
) -> None:
    """w = g / sqrt(v), v = (1 - t^decay) v + t^decay g^2; of a matrix w = g, as its factors are applied later."""
    if options["is_matrix"]:
        weight.copy_(gradient)
        return
    states[0].lerp_(gradient.square(), float(step) ** options["beta2_decay"])
    weight.copy_(gradient / _root(states[0], options))


def _adafactor_factors(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    *batch, rows, columns = shape
    return {"row_var": (*batch, rows, 1), "col_var": (*batch, 1, columns)}


def _adafactor_matrix(gradient: Tensor, step: int, options: Options, factors: Mapping[str, Tensor]) -> Tensor:
    """g / sqrt(R C / mean(R)), clipped: R and C are the means of squares over rows and columns."""
    if not gradient.numel():
        return gradient
    # The first step has weight 1, so the zeros of the start need no correction.
    weight, squares = step ** options["beta2_decay"], gradient.square()
    rows, columns = factors["row_var"], factors["col_var"]
    rows.lerp_(squares.mean(-1, keepdim=True), weight)
    columns.lerp_(squares.mean(-2, keepdim=True), weight)
    # In the memory of the squares: a matrix may be the largest of the model.
    moments = squares.copy_(rows).mul_(columns).div_(rows.mean(-2, keepdim=True).clamp(min=_least(options)))
    direction = moments.clamp_(min=_least(options) ** 2).rsqrt_().mul_(gradient)
    size = direction.norm() / (math.sqrt(direction.numel()) * float(options["d"]))
    return direction.div_(size.clamp_(min=1.0))


def _adafactor_ratio(options: Options, step: int, numel: int, weight_norm: float, direction_norm: float) -> float:
    """Return the scale of the direction. That of a matrix is clipped already."""
    size = 1.0 if options["is_matrix"] else max(1.0, direction_norm / math.sqrt(max(numel, 1)) / options["d"])
    lr = float(options["lr"])
    step_size = min(lr, step**-0.5) if options["relative_step"] else lr
    if options["scale_parameter"]:
        step_size *= max(options["eps"][1], weight_norm / math.sqrt(max(numel, 1)))
    return step_size / size


def _adafactor_finish(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options
) -> None:
    weight.mul_(1 - float(options["lr"]) * options["weight_decay"]).add_(gradient, alpha=-options["ratio"])


ADAFACTOR = Optimizer(
    title="Adafactor",
    text="Keyword arguments of torch.optim.Adafactor, and what Hugging Face's can leave out.",
    keys={
        "lr": (NonNegative, 1e-2, "The largest relative step."),
        "beta2_decay": (
            _NotPositive,
            -0.8,
            "Second moments weigh step t with t to this power: step 1,000 with 0.004 by default.",
        ),
        "eps": (
            _Bounds,
            (None, 1e-3),
            "Lower bounds of the root of a second moment (null: float32's epsilon) and of a parameter's root mean "
            "square.",
        ),
        "d": (
            _AtLeastOne,
            1.0,
            "Largest root mean square of a step before it is scaled. Hugging Face: clip_threshold.",
        ),
        "weight_decay": DECAY,
        "scale_parameter": (Bool, True, "Whether steps are multiplied by the parameter's root mean square."),
        "relative_step": (Bool, True, "Whether the step is at most 1 / sqrt(t)."),
        "state_dtype": (
            StateDtype,
            "fp32",
            "Dtype of second moments of vectors. Those of rows and columns are float32.",
        ),
    },
    states=(State("variance", needed_option="is_other", is_mean_of_squares=True),),
    apply=_adafactor_direction,
    whole=WholeTensorRule(
        finish=_adafactor_finish,
        ratio=_adafactor_ratio,
        matrix=_adafactor_matrix,
        factors=_adafactor_factors,
        workspace=math.prod,
        takes_all=True,
    ),
    keeps_step=False,
)
