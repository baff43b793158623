"""Split layers are compared with the whole ones before the first step: a plan that does not fit is an error."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_expert_routing import Experts
from tests.parallel.test_sequence import Plain, batch_of
from tests.parallel.test_tensor_ranks import config_of

WIDTH = 32


class GateUp(nn.Module):
    """Both in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(WIDTH, 48, bias=False), nn.Linear(24, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        y: Tensor = self.drop(self.back(functional.silu(gate) * up))
        return y


class Normed(nn.Module):
    """What is between columns and rows needs all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(self.both(x).softmax(-1))
        return y


class Sized(nn.Module):
    """What is between columns and rows has a parameter for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.norm, self.back = nn.Linear(WIDTH, 48), nn.LayerNorm(48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(self.norm(self.both(x)))
        return y


class Attention(nn.Module):
    """Of as many heads as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def model_of(mlp: type[nn.Module]) -> nn.Module:
    model = Plain()
    model.blocks = nn.ModuleList(Layer(mlp) for _ in range(2))
    return model


def plan_of(style: str, **more: str) -> dict[str, Any]:
    return {"plan": {"mlp.both": style, "mlp.back": "row", **more}}


CASES: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "halves": (
        GateUp,
        plan_of("column"),
        "parallel.tensor: expected the same outputs of 'blocks.0.mlp' as without a split, found outputs off by .*% of "
        "their norm. The split of its layers does not match their use. "
        "'blocks.0.mlp.both' has 48 outputs, 'blocks.0.mlp.back' behind it 24 inputs: if it fuses 2 layers, "
        'give it the style "column/2"',
    ),
    "whole columns": (Normed, plan_of("column"), 'Change their styles in tensor_parallel.plan, or set "whole"'),
    "sizes": (
        Sized,
        plan_of("column"),
        r"expected 'blocks.0.mlp' to run with its layers split, found RuntimeError: .*\[48\].* Change their",
    ),
    "queries": (GateUp, plan_of("column/2", qkv="column", out="row"), 'give it the style "column/3"'),
    "right": (GateUp, plan_of("column/2", qkv="column/3", out="row"), ""),
}


def tried(name: str, parallel: dict[str, int], stage: int) -> str:
    mlp, plan, _ = CASES[name]
    more: dict[str, Any] = {"gradient_accumulation_steps": 2} if "pipeline" in parallel else {}
    config = config_of(parallel=parallel, tensor_parallel=plan, zero_optimization={"stage": stage}, **more)
    torch.manual_seed(0)
    batch = {key: value[:4] for key, value in batch_of(0, "plain").items()}
    if not more:
        batch = {key: value[:2] for key, value in batch.items()}
    with lowtide.initialize(model_of(mlp), config) as engine:
        try:
            for _ in range(2):
                engine.train_step(batch)
        except ValueError as error:
            return str(error)
        return ""


def all_tried(names: list[str], parallel: dict[str, int], stage: int) -> list[str]:
    return [tried(name, parallel, stage) for name in names]


def test_a_plan_that_does_not_fit_is_an_error_before_the_first_step(ranks: RankPool) -> None:
    for of_rank in ranks(2, all_tried, list(CASES), {"tensor": 2}, 3):
        for name, found in zip(CASES, of_rank, strict=True):
            assert re.search(CASES[name][2], found) if CASES[name][2] else found == "", (name, found)


@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "sequence": 2}])
def test_ranks_beside_it_hear_of_it(ranks: RankPool, parallel: dict[str, int]) -> None:
    for found in ranks(4, tried, "halves", parallel, 1):
        assert 'give it the style "column/2"' in found


class BesideExperts(nn.Module):
    """Split layers, a router and experts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.back, self.router = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = Experts(WIDTH)

    def routed(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made: Tensor = self.experts(x, index, weights)
        return made

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        shared: Tensor = self.back(functional.silu(gate) * up)
        return shared + self.routed(x.flatten(0, 1)).view(x.shape)


class BesideListed(BesideExperts):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))  # type: ignore[assignment]

    def routed(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        experts: Any = self.experts
        for number, expert in enumerate(experts):
            token, choice = torch.where(index == number)
            made = made.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return made


BESIDE: dict[str, type[nn.Module]] = {"one module": BesideExperts, "a list": BesideListed}


def beside_experts(name: str, style: str, parallel: dict[str, int]) -> str | list[float]:
    plan: dict[str, Any] = {"tensor_parallel": plan_of(style)} if parallel else {}
    config = config_of(parallel=parallel, **plan)
    torch.manual_seed(0)
    batch = {key: value[:2] for key, value in batch_of(0, "plain").items()}
    with lowtide.initialize(model_of(BESIDE[name]).double(), config) as engine:
        try:
            return [engine.train_step(batch).loss.item() for _ in range(2)]
        except ValueError as error:
            return str(error)


def all_beside_experts(parallel: dict[str, int]) -> list[str | list[float]]:
    found = [beside_experts(name, "column/2", parallel) for name in BESIDE]
    return [*found, beside_experts("one module", "column", parallel)] if parallel else found


def test_split_layers_beside_experts_in_one_module(ranks: RankPool) -> None:
    """Every rank has the same batch, so the losses are those of one."""
    (plain,) = ranks(1, all_beside_experts, {})
    for *found, wrong in ranks(4, all_beside_experts, {"tensor": 2, "expert": 2}):
        for ours, theirs in zip(found, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        assert "expected the same outputs of 'blocks.0.mlp' as without a split" in wrong
