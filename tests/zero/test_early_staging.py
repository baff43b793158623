"""Gradients leave their parameters as they come, so that those of a block are never there all at once.

That those of a device, which are staged together, are the same is asked in `tests/pretend/test_parity.py`.
"""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.comm import Axis
from lowtide.zero.gradient import GroupGradient
from lowtide.zero.gradient_reducer import GradientReducer
from lowtide.zero.sequence import UnitSequence
from tests.kit.models import Chain
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_alike, train_all, trained

WIDTH, LAYERS, BLOCKS = 32, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class TwiceBlock(Block):
    """Its second layer is used again; each use under a reentrant checkpoint, which runs a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[1]]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([TwiceBlock()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.inputs(x)).float().square().mean()


class Odd(nn.Module):
    """What does not lie side by side in flat memory, what has no dimension, and what one microbatch does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
        self.square = nn.Parameter(torch.eye(WIDTH))  # its gradient is a transposed one
        self.seven, self.unused = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale + self.empty.sum()
        return (x[:, :7] * self.seven).float().square().mean() + (x @ self.square).float().mean()


def blocks() -> nn.Module:
    return Chain(*(Block() for _ in range(BLOCKS)))


def batch(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)),)


CASE = Case(blocks, batch, steps=2)


def held_at_most(cases: list[Case]) -> list[tuple[int, int]]:
    """(how often a gradient was offered in a step, the most that were still held by parameters of its group then)."""
    found, take_early, results = list[int](), GroupGradient.take_early, []

    def noted(self: GroupGradient, index: int, boundary: bool) -> None:
        take_early(self, index, boundary)
        found.append(sum(param.grad is not None for param in self.group.params))

    with mock.patch.object(GroupGradient, "take_early", noted):
        for case in cases:
            found.clear()
            with trained(case, 1):
                results.append((len(found), max(found)))
    return results


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shared_memory"), (2, "sockets"), (1, "auto")])
def test_a_gradient_is_freed_when_it_comes(ranks: RankPool, world_size: int, transport: str) -> None:
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for stage in range(4)]
    for of_rank in ranks(world_size, held_at_most, cases):
        for stage, (offered, held) in enumerate(of_rank):
            assert offered == BLOCKS * (LAYERS - 1), stage  # the last of a block starts its reduction
            # On shared memory one may have to wait for the other rank, which has the slot.
            assert held < LAYERS if transport == "shared_memory" else held == 0, stage


def test_where_gradients_wait_for_the_boundary_they_stay(ranks: RankPool) -> None:
    case = CASE.at(1, accumulation=2, config={"communication": {"transport": "sockets"}})
    for ((_, held),) in ranks(2, held_at_most, [case]):
        assert held == LAYERS - 1


def train_staged_and_not(cases: list[Case], num_refused: int) -> tuple[list[Outcome], list[Outcome]]:
    """num_refused: how often in a backward the slot is said not to be free."""
    next_slot, begin_backward, asked = GradientReducer.next_message, UnitSequence.begin_backward, Counter[int]()

    def refusing(self: GradientReducer, axis: Axis, has_shard: bool) -> Tensor | None:
        asked[id(self)] += 1
        return None if asked[id(self)] <= num_refused else next_slot(self, axis, has_shard)

    def started(self: UnitSequence, *args: Any) -> None:
        asked.clear()
        begin_backward(self, *args)

    with (
        mock.patch.object(GradientReducer, "next_message", refusing),
        mock.patch.object(UnitSequence, "begin_backward", started),
    ):
        staged = train_all(cases)
    with mock.patch.object(GroupGradient, "take_early", lambda self, index, boundary: None):
        return staged, train_all(cases)


@pytest.mark.parametrize("num_refused", [0, 3])  # of five that come; the fourth is one that has come before
def test_one_that_comes_twice_is_added_as_autograd_does(ranks: RankPool, num_refused: int) -> None:
    units = {"zero_optimization": {"units": ["blocks.?"]}}
    forms = [Case(Twice, batch, steps=2, config={**units, "bf16": {"enabled": narrow}}) for narrow in (False, True)]
    cases = [forms[(stage + num_refused) % 2].at(stage) for stage in (0, 2, 3)]
    for staged, plain in ranks(2, train_staged_and_not, cases, num_refused):
        for both in zip(staged, plain, strict=True):
            assert_alike(both)
