"""The model of part `splits`: a decoder whose layers have the names of common families, with experts or without."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
SEED = 1234


@dataclass(frozen=True)
class SplitSize:
    """`num_layers` blocks of `width`, each with experts where num_experts is not 0; sequences of so many tokens."""

    num_layers: int
    width: int
    num_heads: int
    sequence_length: int
    num_experts: int = 0


class Attention(nn.Module):
    def __init__(self, size: SplitSize) -> None:
        super().__init__()
        self.head_dim = size.width // size.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads = [layer(x).view(rows, tokens, -1, self.head_dim) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (one.transpose(1, 2) for one in heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """Two experts for each token, of a list."""

    def __init__(self, size: SplitSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(size.width) for _ in range(size.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, choices = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, place = torch.where(choices == number)
            out = out.index_add(0, at, expert(rows[at]) * weights[at, place, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, size: SplitSize) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp = Experts(size) if size.num_experts else MLP(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Gives the mean cross-entropy over what is not -100; all (rows, tokens) int64 -> () float32.

    shift_labels: the token after each. position_ids are asked for by `parallel.sequence`; the model knows no positions.
    """

    def __init__(self, size: SplitSize) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).float().flatten(0, 1), shift_labels.flatten())


def build_model(size: SplitSize) -> Decoder:
    """The same weights in every process."""
    torch.manual_seed(SEED)
    return Decoder(size)


def build_batch(size: SplitSize, rows: int, device: str) -> dict[str, Tensor]:
    """The same rows in every process."""
    numbers = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (rows, size.sequence_length + 1), generator=numbers).to(device)
    positions = torch.arange(size.sequence_length, device=device).expand(rows, -1)
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": tokens[:, 1:].contiguous()}
