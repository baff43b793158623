"""Weights that some stages share and others do not: each rank has ties of its own."""

import pytest
import torch
from torch import Tensor, nn

from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train, train_plainly
from tests.pipe.pipelines import TOLERANCE_64, pipelined


class Chain(nn.Module):
    """Six layers on three stages; those of 1 and 2 are tied, and those of 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 1)
        for first, second in ((1, 2), (3, 4)):
            self.blocks[second].weight = self.blocks[first].weight
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        result: Tensor = nn.functional.mse_loss(self.head(x), y)
        return result


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 8, generator=generator).double(), torch.randn(rows, 1, generator=generator).double()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_have_different_ties(ranks: RankPool, stage: int) -> None:
    """A rank's first tie is another one's second."""
    case = pipelined(Case(Chain, batch, accumulation=2, clip=0.1), 3, "gpipe", communication={"timeout_seconds": 10})
    found = ranks(3, train, case.at(stage))[0]
    assert_close(found, train_plainly(case, 1, num_parts=2), TOLERANCE_64, TOLERANCE_64)
