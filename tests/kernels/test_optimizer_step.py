"""One optimizer step on a flat shard is that of torch, on every stretch of it, and in one pass with its casts."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.kernels.optimizer_states import new_states
from lowtide.kernels.optimizer_step import CHUNK_NUMEL, update_shard
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import Optimizer

STEPS = 4
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False}
ADAGRAD: dict[str, Any] = {
    "lr": 0.1,
    "lr_decay": 0.01,
    "weight_decay": 0.01,
    "initial_accumulator_value": 0.2,
    "eps": 1e-8,
}
LION: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


class Lion(torch.optim.Optimizer):
    """The formula of arXiv 2302.06675, written down plainly; torch has no Lion."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("m", torch.zeros_like(param))
                update = torch.sign(beta1 * momentum + (1 - beta1) * param.grad)
                param.copy_(param - group["lr"] * (update + group["weight_decay"] * param))
                momentum.copy_(beta2 * momentum + (1 - beta2) * param.grad)


Case = tuple[Optimizer, dict[str, Any], Callable[..., torch.optim.Optimizer]]
CASES: dict[str, Case] = {
    "adamw": (OPTIMIZERS["adamw"], ADAM, torch.optim.AdamW),
    "adam": (OPTIMIZERS["adam"], ADAM, torch.optim.Adam),
    "sgd": (OPTIMIZERS["sgd"], SGD | {"momentum": 0.0}, torch.optim.SGD),
    "sgd with momentum": (OPTIMIZERS["sgd"], SGD, torch.optim.SGD),
    "sgd with dampening": (OPTIMIZERS["sgd"], SGD | {"dampening": 0.3}, torch.optim.SGD),
    "sgd with nesterov": (OPTIMIZERS["sgd"], SGD | {"nesterov": True}, torch.optim.SGD),
    "adagrad": (OPTIMIZERS["adagrad"], ADAGRAD, torch.optim.Adagrad),
    "lion": (OPTIMIZERS["lion"], LION, Lion),
}


def start_values(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """Weights, and the gradient of each step."""
    generator = torch.Generator().manual_seed(numel)
    weight = torch.randn(numel, generator=generator, dtype=dtype)
    return weight, [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(STEPS)]


def run(
    rule: Optimizer,
    options: dict[str, Any],
    weight: Tensor,
    gradients: list[Tensor],
    cuts: tuple[int, ...] = (),
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """The weights after all steps; the shard is updated in stretches that end at `cuts`."""
    master = weight.clone()
    states = list(new_states(rule, master, options).values())
    bounds = [0, *cuts, master.numel()]
    for number, gradient in enumerate(gradients, start=1):
        used = gradient.clone()
        for first, end in pairwise(bounds):
            part = slice(first, end)
            update_shard(
                rule,
                master[part],
                used[part],
                [state[part] for state in states],
                number,
                options,
                scale,
                out[part] if out is not None else None,
            )
    return master


def run_torch(
    make: Callable[..., torch.optim.Optimizer], options: Any, weight: Tensor, gradients: list[Tensor]
) -> Tensor:
    param = nn.Parameter(weight.clone())
    optimizer = make([param], **options)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("numel", [1, 7, 1024, CHUNK_NUMEL + 33])
def test_a_rule_is_its_torch_twin(name: str, numel: int) -> None:
    rule, options, make = CASES[name]
    weight, gradients = start_values(numel)
    exact = run_torch(make, options, weight.double(), [gradient.double() for gradient in gradients])
    torch.testing.assert_close(run(rule, options, weight, gradients).double(), exact, rtol=2e-5, atol=2e-6)
    found = run(rule, options, weight.double(), [gradient.double() for gradient in gradients])
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_odd_stretches_give_the_values_of_the_whole(name: str) -> None:
    rule, options, _ = CASES[name]
    weight, gradients = start_values(5000)
    whole = run(rule, options, weight, gradients)
    torch.testing.assert_close(run(rule, options, weight, gradients, (1, 20, 1031, 4999)), whole, rtol=1e-6, atol=1e-7)
    assert torch.equal(run(rule, options, weight, gradients, (1024, 2048)), whole)  # whole vectors: the same bits


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_scaled_in_the_same_pass(name: str) -> None:
    rule, options, _ = CASES[name]
    weight, gradients = start_values(3000)
    scaled = run(rule, options, weight, [gradient * 8 for gradient in gradients], scale=0.125)
    assert torch.equal(scaled, run(rule, options, weight, gradients))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_parameters_are_the_rounded_master_weights(name: str, dtype: torch.dtype) -> None:
    rule, options, _ = CASES[name]
    weight, gradients = start_values(CHUNK_NUMEL + 33)
    out = torch.full((weight.numel(),), torch.nan, dtype=dtype)
    master = run(rule, options, weight, gradients, (1000,), out=out)
    assert torch.equal(out, master.to(dtype))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_narrow_dtype_are_widened_first(name: str) -> None:
    rule, options, _ = CASES[name]
    weight, gradients = start_values(3000)
    narrow = [gradient.bfloat16() for gradient in gradients]
    wide = [gradient.float() for gradient in narrow]
    assert torch.equal(run(rule, options, weight, narrow, scale=1 / 3), run(rule, options, weight, wide, scale=1 / 3))


def test_a_parameter_that_is_zero_stays_so_without_gradient() -> None:
    """Padding between parameters is updated with them, and must never become anything else."""
    for rule, options, _ in CASES.values():
        zeros = torch.zeros(64)
        assert torch.equal(run(rule, options, zeros, [zeros] * STEPS), zeros), rule.name
