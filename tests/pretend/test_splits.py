"""Layers, sequences and experts that ranks split, and what one computes in tiles: the CPU's numbers, and few waits."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.kit import models
from tests.kit.ranks import on_device
from tests.kit.training import refusal
from tests.parallel import test_expert_routing as experts
from tests.parallel.test_sequence import batch_of as sequences_of, eager_llama, mistral
from tests.parallel.test_split_training import PLAN
from tests.parallel.test_tiles import config_of
from tests.pretend.group import register
from tests.pretend.test_host_waits import waits_of

STEPS = 2
TENSOR: dict[str, Any] = {"parallel": {"tensor": 2}}
SEQUENCE: dict[str, Any] = {"parallel": {"sequence": 2}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def tokens(step: int, kind: str) -> tuple[Tensor, ...]:
    return models.token_batch(step, 4)


# Name: model, batches, which of them, stage, and the config that splits. Another split is another row.
ROWS: dict[str, tuple[Any, Any, str, int, dict[str, Any]]] = {
    "tensor, tied, bf16": (models.tied_gpt, tokens, "", 3, {**TENSOR, **BF16, "tensor_parallel": {"plan": PLAN}}),
    "window, padded, tiles": (
        mistral,
        sequences_of,
        "padded",
        3,
        {**SEQUENCE, "tiles": {"mlp": 5, "loss": 4}},
    ),
    "sequence, packed": (eager_llama, sequences_of, "packed", 2, SEQUENCE),
    "ring, padded": (mistral, sequences_of, "padded", 1, {**SEQUENCE, "sequence_parallel": {"attention": "ring"}}),
}


def train(name: str, device: str) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Losses, norms, an evaluation and the state; and the waits of each step."""
    build, batch_of, kind, stage, more = ROWS[name]
    transport = {"transport": "auto" if device == "auto" else "native"}
    config = config_of(stage, device=device, communication=transport, kernels={"fuse_modules": False}, **more)
    torch.manual_seed(0)
    engine = lowtide.initialize(build(), config)
    values: dict[str, Tensor] = {}
    waits = []
    for step in range(STEPS):
        batch = batch_of(step, kind)
        results: list[Any] = []
        waits.append(waits_of(lambda: results.append(engine.train_step(batch))))  # noqa: B023
        values |= {f"loss {step}": results[0].loss, f"norm {step}": results[0].grad_norm}
    values["evaluated"] = engine.eval_step(batch_of(STEPS, kind))
    values |= engine.state_dict()
    engine.close()
    return {key: value.detach().clone() for key, value in values.items()}, waits


def is_close(found: Tensor, right: Tensor) -> bool:
    """Attention is another kernel on the device."""
    return bool((found - right).norm() <= 1e-6 * right.norm() + 2e-7)


@on_device(2)
def test_a_split_has_the_numbers_of_the_cpu_and_waits_once() -> None:
    register()
    wrong = []
    for name in ROWS:
        on_cpu, _ = train(name, "cpu")
        found, waits = train(name, "auto")
        gc.collect(), gc.collect()
        wrong += [f"{name}: {key}" for key, right in on_cpu.items() if not is_close(found[key], right)]
        wrong += [f"{name}, step {step}: {one}" for step in range(1, STEPS) for one in waits[step][1:]]
    assert not wrong, "\n".join(wrong)


@on_device(2)
def test_other_batches_are_told_at_the_end_of_their_step() -> None:
    """In the first of two microbatches, of shapes that were seen."""
    register()
    with lowtide.initialize(models.TinyGPT(), config_of(1, tensor_parallel={"plan": PLAN}, **TENSOR)) as engine:
        engine.train_step(tokens(0, ""))
        before = engine.state_dict()
        ids, targets = tokens(1, "")
        ids[0, 0] = engine.rank
        text = refusal(engine.train_step, (ids, targets))
        assert text.startswith("batch: expected the same batch on the 2 ranks of tensor (ranks 0, 1), found different")
        assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
        assert not engine.train_step(tokens(2, "")).skipped


# -- experts -----------------------------------------------------------------------------------------------------------

LAYERS = 2


class Batched(experts.Experts):
    """Asks nothing of its tensors, which a host would wait for."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own = top_k_index.clamp(max=self.num_experts - 1)
        inner = torch.tanh((self.up[own] * hidden_states[:, None, None]).sum(-1))
        made = (self.down[own] * inner[:, :, None]).sum(-1) + self.shift[own]
        weights = top_k_weights * (top_k_index < self.num_experts)
        return (made * weights[..., None]).sum(1)


def train_experts(config: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Norms, and how often the host waited for the device in each step."""
    made = experts.model(LAYERS)
    for layer in made.layers:
        layer.__class__ = Batched
    results: list[Any] = []
    waits = []
    with lowtide.initialize(made, {**experts.config_of(2), "zero_optimization": {"stage": 3}, **config}) as engine:
        for step in range(4):
            batch = experts.batch_of(step, engine.rank)
            waits.append(len(waits_of(lambda: results.append(engine.train_step(batch)))))  # noqa: B023
    return [result.grad_norm.item() for result in results], waits


@on_device(2)
def test_experts_have_the_values_of_the_cpu_and_wait_once_for_counts() -> None:
    on_cpu, _ = train_experts({"device": "cpu", "communication": {"transport": "native"}})
    register()
    norms, waits = train_experts({"device": "pretend"})
    assert norms == pytest.approx(on_cpu, rel=1e-9)
    assert waits[-1] <= LAYERS + 1, "one for the counts of each layer, and that of every step"
