"""Training with bf16 and 8-bit optimizer states reaches the loss that float32 states reach."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.kernels.optimizer_states import new_states
from lowtide.kernels.optimizer_step import update_shard
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers import OPTIMIZERS
from tests.kit.models import TinyGPT, token_batch

STEPS, BATCHES, ROWS = 160, 16, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "adagrad": {"lr": 3e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0},
    "sgd": {"lr": 0.03, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}


Update = Callable[[torch.Tensor, torch.Tensor, int], None]
"""(weights, gradient, both (n,) float32; step): changes the weights in place."""


def trained(make: Callable[[torch.Tensor], Update]) -> list[float]:
    """The loss of every step of a language model that learns its few batches by heart."""
    torch.manual_seed(0)
    model = TinyGPT(layers=1)
    params = list(model.parameters())
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    for param, piece in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = piece.view_as(param)
    update = make(flat)
    found = []
    for step in range(1, STEPS + 1):
        loss = model(*token_batch(step % BATCHES, ROWS))
        gradients = torch.autograd.grad(loss, params)
        update(flat, torch.cat([g.reshape(-1) for g in gradients]), step)
        found.append(loss.item())
    return found


@functools.cache
def losses(rule_name: str, state_dtype: torch.dtype, is_split: bool = False) -> list[float]:
    """is_split: the weights are bfloat16 and a byte beside it."""
    rule, options = OPTIMIZERS[rule_name], OPTIONS[rule_name]

    def make(flat: torch.Tensor) -> Update:
        states = list(new_states(rule, flat, options, state_dtype).values())
        master = flat.bfloat16() if is_split else flat
        rest = torch.zeros_like(flat, dtype=torch.int8) if is_split else None
        rounding = Rounding(0, 0) if is_split else None

        def update(flat: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
            update_shard(rule, master, gradient, states, step, options, 1.0, None, rounding=rounding, remainder=rest)
            flat.copy_(master)

        return update

    return trained(make)


def flash_adamw(flat: torch.Tensor) -> Update:
    """AdamW by the formulas of FlashOptim (arXiv 2602.23349), computed in float64: weights of bfloat16 with a byte as
    a fraction of half a unit in the last place; groups of 32 moments with a scale in float16, the first compressed by
    2x / (1 + |x|), of the second the root, all to the nearest."""
    (beta1, beta2), lr, decay = OPTIONS["adamw"]["betas"], OPTIONS["adamw"]["lr"], OPTIONS["adamw"]["weight_decay"]
    mean = squares = torch.zeros(len(flat), dtype=torch.float64)
    rest = torch.zeros_like(mean)

    def grouped(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = torch.nn.functional.pad(values, (0, -len(values) % 32)).view(-1, 32)
        most = groups.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return groups / most, most.half().double()

    def update(flat: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        nonlocal mean, squares, rest
        half = torch.exp2(torch.frexp(flat)[1].double() - 9)  # of the distance between two values of bfloat16
        weight, g = flat.double() + rest / 127 * half, gradient.double()
        mean, squares = beta1 * mean + (1 - beta1) * g, beta2 * squares + (1 - beta2) * g.square()
        root = (squares / (1 - beta2**step)).sqrt() + 1e-8
        weight = weight * (1 - lr * decay) - lr * mean / (1 - beta1**step) / root
        flat.copy_(weight.to(torch.bfloat16))
        half = torch.exp2(torch.frexp(flat)[1].double() - 9)
        rest = ((weight - flat.double()) / half * 127).round().clamp(-127, 127)
        x, scale = grouped(mean)
        x = (2 * x / (1 + x.abs()) * 127).round() / 127
        mean = (x / (2 - x.abs()) * scale).view(-1)[: len(flat)]
        x, scale = grouped(squares.sqrt())
        squares = ((x * 255).round() / 255 * scale).square().view(-1)[: len(flat)]

    flat.copy_(flat.bfloat16())
    return update


@pytest.mark.parametrize(
    ("rule_name", "state_dtype"),
    [*((name, torch.int8) for name in OPTIONS), ("adamw", torch.bfloat16), ("sgd", torch.bfloat16)],
)
def test_the_last_loss_is_that_of_float32_states(rule_name: str, state_dtype: torch.dtype) -> None:
    """Within 2 % of what training gained, either way: another seed moves it by up to 4 %. (8-bit states rounded to the
    nearest code leave it by 4-6 % with AdamW and Adagrad: sums of squares that stop growing make larger steps.)"""
    wide, narrow = losses(rule_name, torch.float32), losses(rule_name, state_dtype)
    last_wide, last_narrow = (sum(found[-BATCHES:]) / BATCHES for found in (wide, narrow))
    gained = wide[0] - last_wide
    assert gained > 1.0  # else nothing was learnt
    assert abs(last_narrow - last_wide) < 0.02 * gained, (last_wide, last_narrow)


def test_split_weights_with_states_of_8_bits_learn_as_flashoptims() -> None:
    """As near to float32 as the rest of this file asks; and so is the published form."""
    wide, split = losses("adamw", torch.float32), losses("adamw", torch.int8, is_split=True)
    last_wide, last_split, last_flash = (sum(x[-BATCHES:]) / BATCHES for x in (wide, split, trained(flash_adamw)))
    gained = wide[0] - last_wide
    assert abs(last_split - last_wide) < 0.02 * gained, (last_wide, last_split)
    assert abs(last_flash - last_wide) < 0.02 * gained, (last_wide, last_flash)
