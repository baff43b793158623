"""Layers around and in the blocks may be of any kind: linear stems, computed weights, frozen ones, containers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train_all, train_plainly
from tests.pipe.pipelines import TOLERANCE_64, pipelined
from tests.zero import containers

WIDTH = 8


class Layer(nn.Module):
    """A residual block; `kind` says of what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        if kind == "computed":
            self.up = spectral_norm(self.up)  # its buffers change with every look at the weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Linear layers before and after the blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer(kind) for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)
        if kind == "frozen":
            for module in (self.stem, self.blocks[0], self.blocks[1], self.blocks[3], self.head):
                module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def train_net(kind: str, ranks_of_pipeline: int, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    values = {
        "gradient_accumulation_steps": 4,
        "steps_per_print": 0,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-2}},
        "parallel": {"pipeline": ranks_of_pipeline},
    }
    engine = lowtide.initialize(Net(kind), values | config)
    numbers = []
    for step in range(2):
        batch = torch.randn(8 * engine.data_size, WIDTH, generator=torch.Generator().manual_seed(step))
        result = engine.train_step(batch.chunk(engine.data_size)[engine.data_rank])
        numbers += [result.loss.item(), result.grad_norm.item()]
    state = engine.state_dict()
    engine.close()
    return numbers, state


def train_nets(trainings: list[tuple[str, int, dict[str, Any]]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train_net(*training) for training in trainings]


KINDS = ("linear", "computed", "frozen")
OVER_TWO = [
    *(("linear", "1f1b"), ("computed", "1f1b"), ("frozen", "1f1b")),
    *(("linear", "zb-v"), ("computed", "zb-h1"), ("frozen", "zb-v")),
]


def test_they_train_like_one_rank(ranks: RankPool) -> None:
    alone = dict(zip(KINDS, ranks(1, train_nets, [(kind, 1, {}) for kind in KINDS])[0], strict=True))
    trainings = [(kind, 2, {"pipeline": {"schedule": schedule}}) for kind, schedule in OVER_TWO]
    for (kind, schedule), (found, state) in zip(OVER_TWO, ranks(2, train_nets, trainings)[0], strict=True):
        expected, expected_state = alone[kind]
        assert found == pytest.approx(expected, rel=1e-5), (kind, schedule)
        assert list(state) == list(expected_state)
        for name, value in expected_state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}: {{}}".format)


def test_with_parameters_that_are_released(ranks: RankPool) -> None:
    sections = {"zero_optimization": {"stage": 3}, "communication": {"transport": "sockets"}}
    split = sections | {"pipeline": {"schedule": "zb-h1"}}
    expected = ranks(2, train_nets, [(kind, 1, sections) for kind in KINDS[1:]])[0]
    found = ranks(4, train_nets, [(kind, 2, split) for kind in KINDS[1:]])[0]
    for (ours, _), (theirs, _) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_stages_begin_within_blocks_that_are_never_called(ranks: RankPool) -> None:
    kinds = [containers.Dicts, containers.Lists, containers.ListsOfBlocks, containers.OwnClass, containers.Mixed]
    cases = [
        Case(kind, models.vector_batch_float64, stage=3 * (number % 2), accumulation=2, steps=2)
        for number, kind in enumerate(kinds)
    ]
    outcomes = ranks(2, train_all, [pipelined(case, 2, "1f1b") for case in cases])[0]
    for case, outcome in zip(cases, outcomes, strict=True):
        expected = train_plainly(case, 1, num_parts=2)
        assert_close(outcome, expected, TOLERANCE_64, TOLERANCE_64, case.build.__name__)
