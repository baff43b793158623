"""A model whose matrix products sleep: a pipeline of any number of ranks takes as long as if each had a processor."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, WIDTH, VOCAB = 2, 3, 16  # by the shape of a product one sees which of a layer's three it is


class SleepingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (ROWS, WIDTH)
        # Not the view itself, which would keep what it is a part of; nor what a later op would save.
        return x + self.linear(x)[:, :WIDTH]


class SleepingModel(nn.Module):
    """Its output is its loss."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(num_blocks))

    def forward(self, tokens: Tensor, classes: Tensor) -> Tensor:  # (ROWS,) both
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(x, classes)


class SleepingProducts(TorchDispatchMode):
    """In the context each product of a block sleeps for so many seconds: its forward and both halves of its backward.

    Splitting a backward splits these, however it is done.
    """

    def __init__(self, forward: float, input_half: float, weight_half: float) -> None:
        super().__init__()
        self._seconds = {
            (ROWS, WIDTH + 1): forward,
            (ROWS, WIDTH): input_half,
            (WIDTH, WIDTH + 1): weight_half,
            (WIDTH + 1, WIDTH): weight_half,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds[tuple(out.shape)])
        return out


def sleeping_batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(num_microbatches * ROWS)
    return tokens % VOCAB, tokens % WIDTH
