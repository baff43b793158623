"""Blocks that a model's own checkpoints recompute, after later forwards of other lengths, have their own forward's."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_tensor_sequence import Mixer, Stacked, config_of

LENGTHS = (6, 7, 2)


class Around(Stacked):
    """Its checkpoints lie around its blocks, and so around what puts parts of the tokens on them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def model() -> Around:
    torch.manual_seed(0)
    return Around(Mixer(), Mixer()).double()


def batch(length: int) -> Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length)).double()


def losses_and_norm() -> list[float]:
    """Of forwards that all come before their backwards."""
    with lowtide.initialize(model(), config_of(gradient_accumulation_steps=len(LENGTHS))) as engine:
        losses = [engine(batch(length)) for length in LENGTHS]
        for loss in losses:
            engine.backward(loss)
        return [*(loss.item() for loss in losses), engine.step().grad_norm.item()]


def test_each_block_has_the_length_of_its_own_forward(ranks: RankPool) -> None:
    plain = model()
    losses = [plain(batch(length)) for length in LENGTHS]
    (sum(losses) / len(LENGTHS)).backward()
    norm = torch.stack([param.grad.norm() for param in plain.parameters() if param.grad is not None]).norm()
    for found in ranks(2, losses_and_norm):
        assert found == pytest.approx([one.item() for one in (*losses, norm)], rel=1e-9)
