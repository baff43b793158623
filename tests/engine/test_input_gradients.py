"""Gradients of what is not the engine's own: of its inputs, and of what lies before and after it, as in plain torch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool

STAGES = (0, 1, 2, 3)
SGD = {"type": "sgd", "params": {"lr": 0.5}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "prescaled": {"prescale_gradients": True},
    "predivided": {"gradient_predivide_factor": 4.0},
    "sent in float16": {"communication_data_type": "fp16", "gradient_accumulation_steps": 2},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 10}, "gradient_accumulation_steps": 2},
}
WORLDS = [(1, ["accumulated", "predivided"]), (2, list(KINDS))]


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


def engine_for(model: nn.Module, stage: int, kind: str) -> lowtide.Engine:
    return lowtide.initialize(model, {"optimizer": SGD, "zero_optimization": {"stage": stage}, **KINDS[kind]})


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def outer_gradients(stage: int, kind: str, rank: int | None, way: str = "") -> list[Tensor]:
    """Of an input, of a layer before the engine, and of a head after it.

    rank: by plain torch, as that rank; None: by an engine. way: in which its backward is called.
    """
    torch.manual_seed(0)
    model, before, head = net(6, 5), nn.Linear(6, 6), nn.Linear(5, 1)
    engine = engine_for(model, stage, kind) if rank is None else None
    x = samples(0, engine.rank if engine is not None else rank or 0).requires_grad_()
    for _ in range(KINDS[kind].get("gradient_accumulation_steps", 1)):  # torch adds the gradients up
        middle = before(x)
        output = (engine or model)(x * x + middle).float()
        loss = head(output).square().mean() + output.sum()
        loss = loss + x.square().mean() + middle.square().mean() + (head.weight * before.weight[0, 0]).sum()  # past it
        if engine is not None and way == "scale":
            engine.scale(loss).backward()
        else:
            engine.backward(loss) if engine is not None and way == "engine" else loss.backward()
    if engine is not None:
        assert not engine.step().skipped
        engine.close()
    return [value.grad for value in (x, *before.parameters(), *head.parameters()) if value.grad is not None]


def all_outer_gradients(kinds: Sequence[str]) -> dict[tuple[str, int, str], list[Tensor]]:
    return {
        (kind, stage, way): outer_gradients(stage, kind, None, way)
        for kind, stage, way in pairs(kinds, STAGES, ("engine", "scale", "loss"))
    }


@pytest.mark.parametrize(("world_size", "kinds"), WORLDS)
def test_gradients_outside_of_the_engine_are_those_of_the_loss_as_it_was_given(
    ranks: RankPool, world_size: int, kinds: list[str]
) -> None:
    for rank, found in enumerate(ranks(world_size, all_outer_gradients, kinds)):
        for (kind, stage, way), gradients in found.items():
            expected = outer_gradients(stage, kind, rank)
            assert len(gradients) == len(expected) == 5
            rtol, atol = (1e-2, 1e-2) if kind == "float16" else (1e-6, 1e-7)
            what = f"{kind}, stage {stage}, rank {rank}, {way}"
            torch.testing.assert_close(gradients, expected, rtol=rtol, atol=atol, msg=f"{what}: {{}}".format)


def train_chain(stage: int, kind: str, way: str) -> list[dict[str, Tensor]]:
    """Two engines, one behind the other: the second's gradient of its input is what the first one's backward gets.

    way: the chain is cut there, or the loss's own backward goes through both, or one engine's does.
    """
    torch.manual_seed(0)
    first, second = engine_for(net(6, 5), stage, kind), engine_for(net(5, 1), stage, kind)
    for step in range(2):
        for _ in range(KINDS[kind].get("gradient_accumulation_steps", 1)):
            middle = first(samples(step, first.rank))
            if way != "cut":
                loss = second(middle).float().square().mean()
                loss.backward() if way == "loss" else second.backward(loss)
                continue
            received = middle.detach().requires_grad_()
            second.backward(second(received).float().square().mean())
            assert received.grad is not None
            first.backward((middle * received.grad).sum())
        first.step(), second.step()
    return [first.state_dict(), second.state_dict()]


def train_chain_plainly(world_size: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    models = [net(6, 5), net(5, 1)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.cat([samples(step, rank) for rank in range(world_size)])
        models[1](models[0](x)).square().mean().backward()
        optimizer.step()
    return [model.state_dict() for model in models]


def train_all_chains(kinds: Sequence[str]) -> dict[tuple[str, int, str], list[dict[str, Tensor]]]:
    return {
        (kind, stage, way): train_chain(stage, kind, way)
        for kind, stage, way in pairs(kinds, (0, 3), ("cut", "loss", "engine"))
    }


@pytest.mark.parametrize(("world_size", "kinds"), WORLDS)
def test_two_engines_in_a_chain_train_as_one_model_by_sgd(ranks: RankPool, world_size: int, kinds: list[str]) -> None:
    expected = train_chain_plainly(world_size)
    for (kind, stage, way), states in ranks(world_size, train_all_chains, kinds)[0].items():
        tolerance = 1e-2 if "float16" in kind else 1e-5
        for found, state in zip(states, expected, strict=True):
            found = {name: value.float() for name, value in found.items()}
            what = f"{kind}, stage {stage}, {way}"
            torch.testing.assert_close(found, dict(state), rtol=tolerance, atol=tolerance, msg=f"{what}: {{}}".format)
