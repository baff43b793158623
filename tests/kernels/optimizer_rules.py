"""What the tests of the Triton optimizer step share: one step from states in the middle of training, and its bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels.optimizer_states import StoredState, new_states, stored_states
from lowtide.optimizers.optimizer import Optimizer

STEP = 7


@dataclass
class Start:
    """Tensors before a step. values: of each state, (n,) float32, as they read from how they are stored."""

    master: Tensor
    gradient: Tensor
    states: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def drawn(
        rule: Optimizer,
        options: Mapping[str, Any],
        numel: int,
        generator: torch.Generator,
        state_dtype: torch.dtype = torch.float32,
        gradient_dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype = torch.float32,
    ) -> "Start":
        def of_all_sizes(decades: float) -> Tensor:
            size = 10 ** (torch.rand(numel, generator=generator) * decades - decades + 1)
            return torch.randn(numel, generator=generator) * size

        master = torch.randn(numel, generator=generator).to(master_dtype)
        states = list(new_states(rule, master, options, state_dtype).values())
        for kept, state in zip(rule.states_for(options), stored_states(states), strict=True):
            values = of_all_sizes(2)
            # Not near 0: what is divided by its root must be right in proportion.
            state.narrow(values.square() + 1e-4 if kept.is_mean_of_squares else values)
        stored = [state.widened().clone() for state in stored_states(states)]
        return Start(master, of_all_sizes(5).to(gradient_dtype), states, stored)

    def copy(self) -> "Start":
        return Start(self.master.clone(), self.gradient.clone(), [s.clone() for s in self.states], self.values)

    def stored(self) -> list[StoredState]:
        return stored_states(self.states)


def magnitudes(name: str, options: Mapping[str, Any], start: Start, after: list[Tensor], scale: float) -> list[Tensor]:
    """Of what float32 rounds in a step: for the weights and each state, (n,) float64; after: the exact states."""
    w, g = start.master.double().abs(), (start.gradient.double() * scale).abs()
    values, lr, decay = [value.double().abs() for value in start.values], options["lr"], options["weight_decay"]
    rule = name.split()[0]
    if rule != "adamw":
        g = g + decay * w
    if rule in ("adamw", "adam"):
        (m, v), (beta1, beta2) = values, options["betas"]
        m, v = m + g, v * beta2 + (1 - beta2) * g.square()
        divisor = (after[1] / (1 - beta2**STEP)).sqrt() + options["eps"]
        return [w + lr / (1 - beta1**STEP) * m / divisor * (1 + v / after[1]), m, v]
    if rule == "lion":
        m, beta1 = values[0] + g, options["betas"][0]
        direction = beta1 * start.values[0].double() + (1 - beta1) * start.gradient.double() * scale
        is_unclear = direction.abs() <= 2.0**-19 * m  # rounding may turn its sign
        return [w + torch.where(is_unclear, 2.0**22 * lr, lr), m]
    if rule == "adagrad":
        total = values[0] + g.square()
        return [w + lr * g / (after[0].sqrt() + options["eps"]) * (1 + total / after[0]), total]
    if not values:
        return [w + lr * g]
    buffer = values[0] * options["momentum"] + g
    return [w + lr * (buffer + g), buffer]
