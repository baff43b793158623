"""Experts in an `nn.ModuleList`, called one by one by the module that has them, train as whole ones do."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.parallel.experts import ExpertPlan
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, assert_close, refusal, train_all
from tests.parallel.trainings import AGAIN, EXPERT, SGD, Row, check

WIDTH, EXPERTS = 6, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.up(x)))
        return out


class Skipping(nn.Module):
    """As the code of DeepSeek's first models: experts without a token are not called."""

    experts: Any

    def __init__(self, allowed: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.allowed = allowed

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, WIDTH)
        weights, choices = self.gate(rows)[:, : self.allowed].softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, k = torch.where(choices == number)
            if len(at):
                out = out.index_add(0, at, expert(rows[at]) * weights[at, k, None])
        return out.view_as(x)


class Calling(Skipping):
    """As Mixtral's first code: each expert is called, some with no token, with a dimension more; the logits go out."""

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, WIDTH)
        logits = self.gate(rows)[:, : self.allowed]
        weights, choices = logits.softmax(-1).topk(2)
        mask = functional.one_hot(choices, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for number in range(EXPERTS):
            k, at = torch.where(mask[number])
            out.index_add_(0, at, self.experts[number](rows[None, at])[0].mul_(weights[at, k, None]))
        return out.view_as(x), logits


class Layer(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(WIDTH, WIDTH), moe

    def forward(self, x: Tensor) -> Tensor:
        found = self.moe(torch.tanh(self.mix(x)))
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return x + out


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(make()) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


skipping, calling = partial(Net, Skipping), partial(Net, Calling)
skipping_some = partial(Net, partial(Skipping, EXPERTS - 1))  # nobody chooses the last expert, which is not called
calling_some = partial(Net, partial(Calling, EXPERTS - 2))  # nobody chooses the last two, which are called


def rows_of(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, WIDTH, generator=torch.Generator().manual_seed(step)).double(),)


def case_of(build: Callable[[], nn.Module], stage: int, accumulation: int = 1) -> Case:
    return Case(build, rows_of, stage, accumulation, clip=0.05, steps=2, config={"optimizer": SGD})


COLUMNS = {"plan": {"experts.*.up": "column", "experts.*.down": "row"}}
ROWS: dict[int, list[Row]] = {  # by number of ranks
    2: [
        (case_of(skipping, 0), 2, EXPERT),
        (case_of(calling, 2, 2), 2, EXPERT),
        (case_of(skipping_some, 3), 2, EXPERT | AGAIN | {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
    ],
    4: [
        (case_of(calling_some, 3), 4, {"parallel": {"expert": 4}, "communication": {"transport": "native"}}),
        (case_of(skipping_some, 1, 2), 2, {"parallel": {"expert": 2, "pipeline": 2}}),
        (case_of(skipping_some, 3), 2, {"parallel": {"expert": 2, "tensor": 2}, "tensor_parallel": COLUMNS}),
    ],
}


@pytest.mark.parametrize("num_ranks", ROWS)
def test_lists_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    check(ranks, num_ranks, ROWS[num_ranks], 1e-9)


@on_ranks(2)
def test_what_nobody_calls_stays_as_it_was() -> None:
    """AdamW would change it by its decay, as it changes what is called with no rows."""
    case = replace(case_of(skipping_some, 1), config={})
    whole, found = train_all([case, case.at(3, config=EXPERT)])
    assert_close(found, whole, 1e-9, 1e-9)


class Chained(Skipping):
    def forward(self, x: Tensor) -> Any:
        for expert in self.experts:
            x = expert(x)
        return x


class Counting(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.get_buffer("num_calls").add_(1)
        return super().forward(x)


class Reading(Skipping):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(self.experts[3].up.weight.dtype))


class Weighing(Skipping):
    def forward(self, x: Tensor) -> Any:
        return torch.stack([expert(x, x.mean()) for expert in self.experts]).sum(0)


class Beside(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.others = [*self.experts]

    def forward(self, x: Tensor) -> Any:
        return self.others[0](x) + self.others[3](x)


FAILING: dict[type[Skipping], str] = {
    Chained: "'layers.0.moe.experts': expected a block that calls the same experts with the same rows in each run",
    Counting: "expected a block that changes no buffer in its forward",
    Reading: "expected that experts are only called, found a use of their 'up'",
    Weighing: "that take only tokens, torch.float64 (..., 6) like the block's input, found a call with",
    Beside: "expected that its block calls experts through the list, found a direct call",
}


def errors() -> dict[type[Skipping], str]:
    config = {"train_batch_size": 4, "optimizer": SGD, **EXPERT}
    found = {}
    for make in FAILING:
        with lowtide.initialize(Net(make), config) as engine:
            try:
                engine.train_step(rows_of(0, 4)[0].chunk(2)[engine.data_rank])
            except (ValueError, AttributeError, RuntimeError) as error:
                found[make] = str(error)
    return found


def test_blocks_that_cannot_be_run_twice_are_errors(ranks: RankPool) -> None:
    found = ranks(2, errors)
    for make, text in FAILING.items():
        assert any(text in of_rank.get(make, "") for of_rank in found), make


def changed(change: Callable[[Any], object]) -> nn.Module:
    model: Any = Net(Skipping)
    for layer in model.layers:
        change(layer.moe)
    return model


@pytest.mark.parametrize(
    ("change", "degree", "text"),
    [
        (lambda moe: None, 3, r"'layers.0.moe.experts': experts\(4\) % expert\(3\) = 1"),
        (
            lambda moe: setattr(moe.experts[1].up, "weight", moe.experts[0].up.weight),
            2,
            "experts of 'layers.0.moe.experts' that share no parameter, found a parameter that several",
        ),
        (
            lambda moe: setattr(moe, "shown", moe.experts[2].down.weight),
            2,
            "that share no parameter, found the same parameter at 'layers.0.moe.shown'",
        ),
        (
            lambda moe: [one.register_parameter("scale", nn.Parameter(torch.ones(()))) for one in moe.experts],
            2,
            r"without buffers and scalar parameters, found 'scale' of shape \(\)",
        ),
        (
            lambda moe: [expert.add_module("norm", nn.BatchNorm1d(WIDTH)) for expert in moe.experts],
            2,
            r"without buffers and scalar parameters, found 'norm.running_mean' of shape \(6,\)",
        ),
    ],
)
def test_lists_that_cannot_be_split(change: Callable[[Any], object], degree: int, text: str) -> None:
    assert re.search(text, refusal(ExpertPlan.of, changed(change), degree))
