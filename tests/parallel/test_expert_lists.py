"""Experts in an `nn.ModuleList`, called one by one by the module that has them, train as whole ones do."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.parallel.experts import ExpertPlan
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train_all, train_plainly

WIDTH, EXPERTS = 6, 4
SGD: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.up(x)))
        return out


class Skipping(nn.Module):
    """As the code of DeepSeek's first models: experts without a token are not called."""

    def __init__(self, allowed: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.allowed = allowed

    def forward(self, x: Tensor) -> Tensor:
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

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def skipping() -> nn.Module:
    return Net(Skipping).double()


def calling() -> nn.Module:
    return Net(Calling).double()


def skipping_some() -> nn.Module:
    """Nobody chooses the last expert, which is not called."""
    return Net(partial(Skipping, EXPERTS - 1)).double()


def calling_some() -> nn.Module:
    """Nobody chooses the last two, which are called."""
    return Net(partial(Calling, EXPERTS - 2)).double()


def rows_of(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, WIDTH, generator=torch.Generator().manual_seed(step)).double(),)


def case_of(build: Callable[[], nn.Module]) -> Case:
    return Case(build, rows_of, clip=0.05, accumulation=2, steps=2, config={"optimizer": SGD})


Row = tuple[Callable[[], nn.Module], int, int, dict[str, Any]]  # model, data-parallel ranks, stage, config
HOST = {"device": "cpu"}
COLUMNS = {"plan": {"experts.*.up": "column", "experts.*.down": "row"}}
ROWS: dict[int, list[Row]] = {  # by number of ranks
    2: [
        (skipping, 2, 0, {}),
        (calling, 2, 2, {}),
        (skipping_some, 2, 3, {"activation_checkpointing": {"every": 1}, "zero_optimization": {"offload_param": HOST}}),
    ],
    4: [
        (calling_some, 4, 3, {"parallel": {"expert": 4}, "communication": {"transport": "native"}}),
        (skipping_some, 2, 1, {"parallel": {"expert": 2, "pipeline": 2}}),
        (skipping_some, 2, 3, {"parallel": {"expert": 2, "tensor": 2}, "tensor_parallel": COLUMNS}),
    ],
}


@pytest.mark.parametrize("num_ranks", ROWS)
def test_lists_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    cases = [
        case_of(build).at(stage, config={"parallel": {"expert": 2}, **config})
        for build, _, stage, config in ROWS[num_ranks]
    ]
    for (build, size, *row), outcome in zip(ROWS[num_ranks], ranks(num_ranks, train_all, cases)[0], strict=True):
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        expected = train_plainly(case_of(build), size, optimizer, num_parts=2)
        assert_close(outcome, expected, 1e-9, 1e-9, f"{build.__name__} {row}")


def test_what_nobody_calls_stays_as_it_was(ranks: RankPool) -> None:
    """AdamW would change it by its decay, as it changes what is called with no rows."""
    case = replace(case_of(skipping_some), config={})
    split = case.at(3, config={"parallel": {"expert": 2}})
    (whole, found), _ = ranks(2, train_all, [case.at(1), split])
    assert_close(found, whole, 1e-9, 1e-9)


def trained(parallel: dict[str, int], stage: int, folder: Path, loads: bool) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    config = {"train_batch_size": 8, "steps_per_print": 0, "optimizer": {"type": "adamw"}, "parallel": parallel}
    with lowtide.initialize(skipping(), {**config, "zero_optimization": {"stage": stage}}) as engine:
        if loads:
            engine.load_checkpoint(folder, tag="one")
        else:
            engine.train_step(rows_of(0, 8)[0].chunk(engine.data_size)[engine.data_rank])
            engine.save_checkpoint(folder, tag="one")
        found = engine.state_dict()
        loss = engine.train_step(rows_of(1, 8)[0].chunk(engine.data_size)[engine.data_rank]).loss
        return found, float(loss)


def test_checkpoints_know_no_split_of_lists(ranks: RankPool, tmp_path: Path) -> None:
    expected, loss = ranks(4, trained, {"expert": 2}, 1, tmp_path, False)[0]
    assert expected["layers.1.moe.experts.3.up.weight"].shape == (5, WIDTH)
    for num, parallel, stage in ((1, {}, 0), (4, {"expert": 4}, 3)):
        found, next_loss = ranks(num, trained, parallel, stage, tmp_path, True)[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        assert next_loss == pytest.approx(loss, rel=1e-9)


class Chained(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Counting(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("num_calls").add_(1)
        return super().forward(x)


class Reading(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        expert: Any = self.experts[3]
        return super().forward(x.to(expert.up.weight.dtype))


class Weighing(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([expert(x, x.mean()) for expert in self.experts])
        return found.sum(0)


class Beside(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.others = [*self.experts]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.others[0](x) + self.others[3](x)
        return out


FAILING: dict[type[Skipping], str] = {
    Chained: "'layers.0.moe.experts': expected a block that calls the same experts with the same rows in each run",
    Counting: "expected a block that changes no buffer in its forward",
    Reading: "expected that experts are only called, found a use of their 'up'",
    Weighing: r"that take only tokens, torch.float64 \(..., 6\) like the block's input, found a call with",
    Beside: "expected that its block calls experts through the list, found a direct call",
}


def errors() -> dict[type[Skipping], str]:
    config = {"train_batch_size": 4, "steps_per_print": 0, "optimizer": SGD, "parallel": {"expert": 2}}
    found = {}
    for make in FAILING:
        engine = lowtide.initialize(Net(make).double(), config)
        try:
            engine.train_step(rows_of(0, 4)[0].chunk(2)[engine.data_rank])
        except (ValueError, AttributeError, RuntimeError) as error:
            found[make] = str(error)
        engine.close()
    return found


def test_blocks_that_cannot_be_run_twice_are_errors(ranks: RankPool) -> None:
    found = ranks(2, errors)
    for make, text in FAILING.items():
        assert any(re.search(text, of_rank.get(make, "")) for of_rank in found), make


class Tied(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].up.weight = self.experts[0].up.weight  # type: ignore[union-attr]  # an Expert


class Shown(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.shown = self.experts[2].down.weight  # type: ignore[union-attr]  # an Expert


class Scaled(Skipping):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.scale = nn.Parameter(torch.ones(()))


class Normed(Skipping):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.norm = nn.BatchNorm1d(WIDTH)


@pytest.mark.parametrize(
    ("make", "degree", "text"),
    [
        (Skipping, 3, r"'layers.0.moe.experts': experts\(4\) % expert\(3\) = 1"),
        (Tied, 2, "experts of 'layers.0.moe.experts' that share no parameter, found a parameter that several"),
        (Shown, 2, "that share no parameter, found the same parameter at 'layers.0.moe.shown'"),
        (Scaled, 2, r"without buffers and scalar parameters, found 'scale' of shape \(\)"),
        (Normed, 2, r"without buffers and scalar parameters, found 'norm.running_mean' of shape \(6,\)"),
    ],
)
def test_lists_that_cannot_be_split(make: type[Skipping], degree: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ExpertPlan.of(Net(make), degree)
