"""The model, its sizes and its data: the same for every contender."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
SEED = 1234


@dataclass(frozen=True)
class GPTSize:
    """Shape of a model: `num_layers` blocks of `width`, for sequences of `sequence_length` tokens, which are bytes."""

    num_layers: int
    width: int
    num_heads: int
    sequence_length: int
    vocabulary: int = VOCABULARY
    has_positions: bool = True  # a table of them, as long as the sequence

    @property
    def num_parameters(self) -> int:
        """Of blocks: matrices, and vectors of biases and norms. Beside them: tables, the last norm and the head."""
        of_blocks = self.num_layers * (12 * self.width**2 + 13 * self.width)
        num_positions = self.sequence_length if self.has_positions else 0
        return of_blocks + (2 * self.vocabulary + num_positions + 2) * self.width


SIZES = {
    "tiny": GPTSize(num_layers=2, width=64, num_heads=4, sequence_length=32),  # 0.1M parameters
    "10M": GPTSize(num_layers=6, width=384, num_heads=6, sequence_length=128),  # 10.9M parameters
    "85M": GPTSize(num_layers=12, width=768, num_heads=12, sequence_length=128),  # 85.5M parameters
}


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a GELU MLP of four times the width."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: Tensor) -> Tensor:
        """Gives causal self-attention; x: (batch, sequence, width)."""
        batch, sequence, width = x.shape
        heads = self.attention_in(x).view(batch, sequence, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Begin(nn.Module):
    """Tokens, and positions if the size has a table of them: (batch, sequence) int64 -> (batch, sequence, width)."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence_length, size.width) if size.has_positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Model(nn.Module):
    """What is before the blocks, they, and what is behind; its output is its loss, () float32."""

    def __init__(self, begin: nn.Module, blocks: Iterable[nn.Module], end: nn.Module) -> None:
        super().__init__()
        self.begin = begin
        self.blocks = nn.ModuleList(blocks)
        self.end = end

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.end(x), targets)


class Stack(nn.Module):
    """Blocks one after the other; its output is its loss, the mean of squares."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x if targets is None else x - targets).square().mean()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; a loss in 16 bits would hide what a step changes."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def draw_weights(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def initialize_in_place(model: nn.Module) -> None:
    """Gives every parameter a value as the constructor does, where there is only room for it so far (`to_empty`)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
    draw_weights(model)


def build_model(size: GPTSize) -> Model:
    """Build a GPT over bytes with the same initial weights in every process."""
    torch.manual_seed(SEED)
    blocks = [Block(size.width, size.num_heads) for _ in range(size.num_layers)]
    head = nn.Linear(size.width, size.vocabulary, bias=False)
    model = Model(Begin(size), blocks, nn.Sequential(nn.LayerNorm(size.width), head))
    draw_weights(model)
    return model


def build_batches(size: GPTSize, num_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Draw global batches, the same in every process: (tokens, targets) of shape (rows, sequence) each."""
    generator = torch.Generator().manual_seed(SEED)
    windows = torch.randint(size.vocabulary, (num_batches, rows, size.sequence_length + 1), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in windows]
