"""The models that pipelines are compared with, each in three parts: what is before its blocks, they, what is behind.

[Note: Sleeps in place of work]
A `SleepingModel` has one linear layer a block, too small to take any time. Under `SleepingProducts` the three matrix
products of such a layer sleep: the forward, the gradient of the input, the gradient of the weight. Whoever splits a
backward, however it is done, splits it between the second and the third. So any number of ranks run on any number of
cores as if each had a processor of its own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from _model import SEED, SIZES, VOCABULARY, Block, GPTSize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

PIPELINE_SIZES = {
    **SIZES,
    "tiny-deep": GPTSize(num_layers=16, width=64, num_heads=4, sequence_length=32),  # 0.8M parameters
    "100M": GPTSize(num_layers=16, width=720, num_heads=12, sequence_length=128),  # 100.1M parameters
}
SLEEPING_ROWS, SLEEPING_WIDTH = 2, 3  # by the shape of a product one sees which of the three it is


class Begin(nn.Module):
    """Tokens and positions: (batch, sequence) int64 -> (batch, sequence, width)."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.sequence_length, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return out


class SleepingBlock(nn.Module):
    """(rows, width) -> the same, by way of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SLEEPING_WIDTH, SLEEPING_WIDTH + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out[:, :SLEEPING_WIDTH].contiguous()


class PipelineModel(nn.Module):
    """Begin, blocks and end; its output is its loss, () float32."""

    def __init__(self, begin: nn.Module, blocks: list[nn.Module], end: nn.Module) -> None:
        super().__init__()
        self.begin = begin
        self.blocks = nn.ModuleList(blocks)
        self.end = end

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.end(x), targets)


class Part(nn.Module):
    """The blocks of one stage, and the begin or the end of the model where they belong to it."""

    def __init__(self, model: PipelineModel, blocks: range) -> None:
        super().__init__()
        self.begin = model.begin if blocks.start == 0 else nn.Identity()
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.end = model.end if blocks.stop == len(model.blocks) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.end(x)
        return out


class SleepingProducts(TorchDispatchMode):
    """In the context the products of a `SleepingBlock` sleep. [Note: Sleeps in place of work]"""

    def __init__(self, forward: float, input_half: float, weight_half: float) -> None:
        """Seconds of each of the three products of one block."""
        super().__init__()
        self._seconds = {
            (SLEEPING_ROWS, SLEEPING_WIDTH + 1): forward,
            (SLEEPING_ROWS, SLEEPING_WIDTH): input_half,
            (SLEEPING_WIDTH, SLEEPING_WIDTH + 1): weight_half,
            (SLEEPING_WIDTH + 1, SLEEPING_WIDTH): weight_half,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds[tuple(out.shape)])
        return out


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build_model(size_name: str) -> PipelineModel:
    """Gives the GPT of that size with the same initial weights in every process."""
    torch.manual_seed(SEED)
    size = PIPELINE_SIZES[size_name]
    head = nn.Linear(size.width, VOCABULARY, bias=False)
    blocks: list[nn.Module] = [Block(size.width, size.num_heads) for _ in range(size.num_layers)]
    model = PipelineModel(Begin(size), blocks, nn.Sequential(nn.LayerNorm(size.width), head))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def build_batches(size_name: str, num_steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Gives the batch of each step: random bytes and what follows them, both (rows, sequence) int64."""
    generator = torch.Generator().manual_seed(SEED)
    shape = num_steps, rows, PIPELINE_SIZES[size_name].sequence_length + 1
    windows = torch.randint(VOCABULARY, shape, generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in windows]


def build_sleeping_model(num_blocks: int) -> PipelineModel:
    """Gives the model whose blocks can sleep; the same in every process."""
    torch.manual_seed(SEED)
    blocks: list[nn.Module] = [SleepingBlock() for _ in range(num_blocks)]
    return PipelineModel(nn.Embedding(VOCABULARY, SLEEPING_WIDTH), blocks, nn.Identity())


def build_sleeping_batches(num_steps: int, num_microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """Gives the batch of each step: tokens and classes, both (microbatches x rows,) int64."""
    tokens = torch.arange(num_microbatches * SLEEPING_ROWS)
    return [(tokens % VOCABULARY, tokens % SLEEPING_WIDTH) for _ in range(num_steps)]
