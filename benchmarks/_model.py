"""The model, its sizes and its data: the same for every contender."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
        """Of a `GPT` of this shape: what its blocks have, and what stands before and behind them."""
        width = self.width
        matrices, vectors = 12 * width**2, 13 * width  # of a block; its biases and norms are the vectors
        positions = self.sequence_length if self.has_positions else 0
        around = (2 * self.vocabulary + positions) * width + 2 * width
        return self.num_layers * (matrices + vectors) + around


SIZES = {
    "tiny": GPTSize(num_layers=2, width=64, num_heads=4, sequence_length=32),  # 0.1M parameters
    "10M": GPTSize(num_layers=6, width=384, num_heads=6, sequence_length=128),  # 10.9M parameters
    "85M": GPTSize(num_layers=12, width=768, num_heads=12, sequence_length=128),  # 85.5M parameters
    # For GPUs alone.
    "350M": GPTSize(num_layers=28, width=1024, num_heads=16, sequence_length=2048),  # 355.3M parameters
    "1.3B": GPTSize(num_layers=26, width=2048, num_heads=16, sequence_length=2048),  # 1314.9M parameters
    "3B": GPTSize(num_layers=38, width=2560, num_heads=20, sequence_length=2048),  # 2996.9M parameters
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


class GPT(nn.Module):
    """A byte-level GPT that gives its own loss."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence_length, size.width) if size.has_positions else None
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.final_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        draw_weights(self)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gives the mean cross-entropy; tokens, targets: (batch, sequence) int64 -> () float32."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x)).float()  # a loss in 16 bits would hide what a step changes
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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


def sized(size_name: str, num_layers: int) -> GPTSize:
    """Gives the size with so many blocks in place of its own."""
    return replace(SIZES[size_name], num_layers=num_layers)


def build_model(size_name: str) -> GPT:
    """Gives the model with the same initial weights in every process."""
    torch.manual_seed(SEED)
    return GPT(SIZES[size_name])


def build_batches(size_name: str, text_file: str, num_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Gives the global batches from the bytes of a file, each (tokens, targets) of shape (rows, sequence)."""
    length = SIZES[size_name].sequence_length
    data = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(data) - length - 1, (num_batches, rows), generator=generator)
    windows = data[starts[..., None] + torch.arange(length + 1)]  # (num_batches, rows, length + 1)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in windows]
