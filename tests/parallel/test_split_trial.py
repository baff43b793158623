"""Split layers are compared with the whole ones before the first step: a plan that does not fit is an error."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_expert_routing import Experts
from tests.parallel.test_sequence import Plain, batch_of
from tests.parallel.trainings import split_config

WIDTH = 32


class GateUp(nn.Module):
    """Both in one layer. between: what is between columns and rows; without it the gate opens the rest."""

    def __init__(self, between: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48 if between else 24, WIDTH)
        self.drop, self.between = nn.Dropout(0.1), between() if between else None

    def forward(self, x: Tensor) -> Tensor:
        if self.between is not None:
            return self.back(self.between(self.both(x)))
        gate, up = self.both(x).chunk(2, dim=-1)
        y: Tensor = self.drop(self.back(functional.silu(gate) * up))
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
    def __init__(self, mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class BesideExperts(GateUp):
    """Split layers, a router and experts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.router = nn.Dropout(0.0), nn.Linear(WIDTH, 4)
        self.experts: Any = Experts(WIDTH)

    def routed(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made: Tensor = self.experts(x, index, weights)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.routed(x.flatten(0, 1)).view(x.shape)


class BesideListed(BesideExperts):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def routed(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            made = made.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return made


HALVES = (
    "parallel.tensor: expected the same outputs of 'blocks.0.mlp' as without a split, found outputs off by .*% of "
    "their norm. The split of its layers does not match their use. "
    "'blocks.0.mlp.both' has 48 outputs, 'blocks.0.mlp.back' behind it 24 inputs: if it fuses 2 layers, "
    'give it the style "column/2"'
)
# The MLP, its style, those of attention, and the error.
CASES: list[tuple[Callable[[], nn.Module], str, dict[str, str], str]] = [
    (GateUp, "column", {}, HALVES),
    # What is between columns and rows needs all columns, or has a parameter for each.
    (
        partial(GateUp, partial(nn.Softmax, -1)),
        "column",
        {},
        'Change their styles in tensor_parallel.plan, or set "whole"',
    ),
    (
        partial(GateUp, partial(nn.LayerNorm, 48)),
        "column",
        {},
        r"expected 'blocks.0.mlp' to run with its layers split, found RuntimeError: .*\[48\].* Change their",
    ),
    (GateUp, "column/2", {"qkv": "column", "out": "row"}, 'give it the style "column/3"'),
    (GateUp, "column/2", {"qkv": "column/3", "out": "row"}, r"^\[.*\]$"),
]


def loss_under_autocast() -> float:
    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList(Layer(partial(GateUp, nn.Tanh)) for _ in range(2))
    plan = {"mlp.both": "column", "mlp.back": "row", "qkv": "column/3", "out": "row"}
    config = split_config({"tensor": 2}, tensor_parallel={"plan": plan}, torch_autocast={"enabled": True})
    with lowtide.initialize(model, config) as engine:
        return engine.train_step({key: value[:2] for key, value in batch_of(0, "plain").items()}).loss.item()


def test_operations_in_bfloat16_may_differ_by_their_rounding(ranks: RankPool) -> None:
    assert ranks(2, loss_under_autocast)[0] > 0


def tried(case: int, parallel: dict[str, int], stage: int = 3) -> str:
    """The error of two steps, or their losses."""
    mlp, style, more, _ = CASES[case]
    return losses(mlp, parallel, stage, {"mlp.both": style, "mlp.back": "row", **more})


def losses(mlp: Callable[[], nn.Module], parallel: dict[str, int], stage: int, plan: dict[str, str]) -> str:
    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList(Layer(mlp) for _ in range(2))
    sections = {"tensor_parallel": {"plan": plan}} if parallel else {}
    accumulation = 2 if "pipeline" in parallel else 1
    config = split_config(
        parallel, **sections, zero_optimization={"stage": stage}, gradient_accumulation_steps=accumulation
    )
    batch = {key: value[: 2 * accumulation] for key, value in batch_of(0, "plain").items()}
    with lowtide.initialize(model.double(), config) as engine:
        try:
            return str([round(engine.train_step(batch).loss.item(), 9) for _ in range(2)])
        except ValueError as error:
            return str(error)


def all_tried() -> list[str]:
    return [tried(case, {"tensor": 2}) for case in range(len(CASES))]


def test_a_plan_that_does_not_fit_is_an_error_before_the_first_step(ranks: RankPool) -> None:
    for of_rank in ranks(2, all_tried):
        for (*_, text), found in zip(CASES, of_rank, strict=True):
            assert re.search(text, found)


@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "sequence": 2}])
def test_ranks_beside_it_hear_of_it(ranks: RankPool, parallel: dict[str, int]) -> None:
    for found in ranks(4, tried, 0, parallel, 1):
        assert 'give it the style "column/2"' in found


def all_beside_experts(parallel: dict[str, int]) -> list[str]:
    return [
        losses(build, parallel, 0, {"mlp.both": style, "mlp.back": "row"})
        for build, style in ((BesideExperts, "column/2"), (BesideListed, "column/2"), (BesideExperts, "column"))
    ]


def test_split_layers_beside_experts_in_one_module(ranks: RankPool) -> None:
    """Every rank has the same batch, so the losses are those of one."""
    (plain,) = ranks(1, all_beside_experts, {})
    for *found, wrong in ranks(4, all_beside_experts, {"tensor": 2, "expert": 2}):
        assert found == plain[:2]
        assert "expected the same outputs of 'blocks.0.mlp' as without a split" in wrong
