"""One optimizer step on a flat shard: one pass over memory, chunk by chunk.

Each chunk is small enough to stay in the cache between unscaling, update and cast. All functions here are elementwise:
what they do to an element does not depend on where it lies, so a shard may be any piece of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 18  # 1 MiB of float32 a stream: weight, gradient and two moments fit into a second-level cache


@dataclass(frozen=True)
class UpdateRule:
    """An elementwise optimizer.

    apply(weight, gradient, states, step, options): updates weight and states in place; step counts from 1.
    states: the name and the start value of each state; options with the key named there, if any, start it instead.
    """

    name: str
    states: tuple[str, ...]
    apply: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Mapping[str, Any]], None]
    start_option: str | None = None  # the option that gives the states' start value, else 0


def update_shard(
    rule: UpdateRule,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    step: int,
    options: Mapping[str, Any],
    gradient_scale: float,
    out: Tensor | None,
) -> None:
    """master, states = rule(master, gradient_scale * gradient); out = master in the dtype of out.

    master, states: (n,) float32 or wider; gradient: (n,) any float dtype, used up; out: (n,) or None where the
    parameters are the master weights themselves.
    """
    step_tensor = torch.tensor(float(step), device=master.device)
    for start in range(0, master.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        weight, grad = master[chunk], gradient[chunk]
        if grad.dtype != weight.dtype:
            grad = grad.to(weight.dtype)
        if gradient_scale != 1.0:
            grad.mul_(gradient_scale)
        rule.apply(weight, grad, [state[chunk] for state in states], step_tensor, options)
        if out is not None:
            out[chunk].copy_(weight)


def _adam(decoupled: bool) -> Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Mapping[str, Any]], None]:
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def apply(
        weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]
    ) -> None:
        beta1, beta2 = options["betas"]
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


def _sgd(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]) -> None:
    is_first = int(step) == 1
    torch._fused_sgd_(
        [weight],
        [gradient],
        list(states) if options["momentum"] else [],
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        lr=options["lr"],
        dampening=options["dampening"],
        nesterov=options["nesterov"],
        maximize=False,
        is_first_step=is_first,
    )


def _adagrad(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]
) -> None:
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


def _lion(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]) -> None:
    """w -= lr * (sign(beta1 m + (1 - beta1) g) + decay w);  m = beta2 m + (1 - beta2) g.

    Source: Lion, arXiv 2302.06675, program 1.
    """
    beta1, beta2 = options["betas"]
    momentum = states[0]
    weight.mul_(1 - options["lr"] * options["weight_decay"])
    weight.add_(torch.lerp(gradient, momentum, beta1).sign_(), alpha=-options["lr"])
    momentum.lerp_(gradient, 1 - beta2)


_MOMENTS = ("exp_avg", "exp_avg_sq")
RULES: Mapping[str, UpdateRule] = {
    "adamw": UpdateRule("adamw", _MOMENTS, _adam(decoupled=True)),
    "adam": UpdateRule("adam", _MOMENTS, _adam(decoupled=False)),
    "sgd": UpdateRule("sgd", ("momentum_buffer",), _sgd),
    "lion": UpdateRule("lion", ("exp_avg",), _lion),
    "adagrad": UpdateRule("adagrad", ("sum",), _adagrad, start_option="initial_accumulator_value"),
}
