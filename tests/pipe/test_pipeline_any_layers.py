"""Layers around and in the blocks may be of any kind: linear stems, computed weights, frozen ones, containers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import lowtide
from tests import models
from tests.pipe.pipelines import TOLERANCE_64, pipelined
from tests.ranks import RankPool
from tests.zero import containers
from tests.zero.training import Case, assert_close, train_all, train_plainly

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
    for step in range(3):
        batch = torch.randn(8 * engine.data_size, WIDTH, generator=torch.Generator().manual_seed(step))
        result = engine.train_step(batch.chunk(engine.data_size)[engine.data_rank])
        numbers += [result.loss.item(), result.grad_norm.item()]
    state = engine.state_dict()
    engine.close()
    return numbers, state


@pytest.mark.parametrize("kind", ["linear", "computed", "frozen"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_they_train_like_one_rank(ranks: RankPool, kind: str, schedule: str) -> None:
    expected, expected_state = ranks(1, train_net, kind, 1, {})[0]
    found, state = ranks(2, train_net, kind, 2, {"pipeline": {"schedule": schedule}})[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("kind", ["computed", "frozen"])
def test_with_parameters_that_are_released(ranks: RankPool, kind: str) -> None:
    sections = {"zero_optimization": {"stage": 3}, "communication": {"route": "sockets"}}
    expected, _ = ranks(2, train_net, kind, 1, sections)[0]
    found, _ = ranks(4, train_net, kind, 2, sections | {"pipeline": {"schedule": "zb-h1"}})[0]
    assert found == pytest.approx(expected, rel=1e-5)


def test_stages_begin_within_blocks_that_are_never_called(ranks: RankPool) -> None:
    kinds = [containers.Dicts, containers.Lists, containers.ListsOfBlocks, containers.OwnClass, containers.Mixed]
    cases = [Case(kind, models.vector_batch_float64, accumulation=2) for kind in kinds]
    grid = [pipelined(case.at(stage), 2, "1f1b") for case in cases for stage in (0, 3)]
    outcomes = iter(ranks(2, train_all, grid)[0])
    for case in cases:
        expected = train_plainly(case, 1, num_parts=2)
        for _ in range(2):
            assert_close(next(outcomes), expected, TOLERANCE_64, TOLERANCE_64, case.build.__name__)
