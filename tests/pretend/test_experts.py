"""Experts that ranks of a device share: the values of the CPU, and one wait of the host for each layer's counts."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.kit.ranks import on_device
from tests.parallel.test_expert_routing import Experts, batch_of, config_of, model
from tests.pretend import group
from tests.pretend.test_host_waits import waits_of

LAYERS, STEPS = 2, 4


class Batched(Experts):
    """Asks nothing of its tensors, which a host would wait for."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own = top_k_index.clamp(max=self.num_experts - 1)
        inner = torch.tanh((self.up[own] * hidden_states[:, None, None]).sum(-1))
        made = (self.down[own] * inner[:, :, None]).sum(-1) + self.shift[own]
        weights = top_k_weights * (top_k_index < self.num_experts)
        return (made * weights[..., None]).sum(1)


def train(stage: int, config: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Norms, and how often the host waited for the device in each step."""
    made = model(LAYERS)
    for layer in made.layers:
        layer.__class__ = Batched
    zero = {"zero_optimization": {"stage": stage}}
    norms: list[Tensor] = []
    waits = []
    with lowtide.initialize(made, {**config_of(2), **zero, **config}) as engine:
        for number in range(STEPS):

            def step(batch: tuple[Tensor, ...] = batch_of(number, engine.rank)) -> None:
                norms.append(engine.train_step(batch).grad_norm)

            if config["device"] == "pretend":
                waits.append(len(waits_of(step)))
            else:
                step()
    return [norm.item() for norm in norms], waits


@on_device(2)
def test_a_device_has_the_values_of_the_cpu() -> None:
    on_cpu, _ = train(3, {"device": "cpu", "communication": {"transport": "native"}})
    group.register()
    norms, waits = train(3, {"device": "pretend"})
    assert norms == pytest.approx(on_cpu, rel=1e-9)
    assert waits[-1] <= LAYERS + 1, "one for the counts of each layer, and that of every step"
