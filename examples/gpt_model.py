"""A small GPT over bytes, in plain PyTorch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256


@dataclass(frozen=True)
class GPTShape:
    """The size of the model: what has to be known to build it."""

    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    context: int = 128

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"--width {self.width} is not divisible by --heads {self.num_heads}: every head takes an equal part "
                f"of the width; try --width {self.width + self.num_heads - self.width % self.num_heads}"
            )

    @property
    def num_parameters(self) -> int:
        """The number of parameters of a GPT of this size."""
        layer = 12 * self.width**2 + 13 * self.width  # four matrices with bias, two norms
        return self.num_layers * layer + (2 * NUM_BYTES + self.context + 2) * self.width


class Embedding(nn.Embedding):
    """An embedding with the small initial values of GPT-2, so that the first logits are close to uniform."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """One layer of the transformer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_output = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_up = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width) -> the same shape."""
        x = x + self.attend(self.attention_norm(x))
        hidden: Tensor = self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))
        return x + hidden

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention. x: (batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head width)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class GPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.byte_embedding = Embedding(NUM_BYTES, shape.width)
        self.position_embedding = Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Gives the logits, or with targets the mean loss in nats per byte.

        tokens, targets: (batch, length) int64, length at most the context -> logits (batch, length, 256), or a loss ().
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, num_bytes: int, context: int, device: torch.device) -> bytes:
    """Continues the prompt by num_bytes sampled bytes, and gives both; the same bytes for the same model.

    The model is called exactly num_bytes times. Bytes are drawn at temperature 0.8 from a generator with a fixed seed.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -context:])[0, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / 0.8, dim=-1), num_samples=1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    return bytes(tokens[0].tolist())
