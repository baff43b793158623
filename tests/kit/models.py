"""Small models that many tests train, and their batches."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB = 301  # the embedding is longer than a shard of four, and nothing divides it
LENGTH = 7
FEATURES = 5


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators that take a keyword by its former name leave it."""

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


def recomputing(model: Any, use_reentrant: bool) -> Any:
    """A model of Hugging Face that recomputes its layers itself."""
    current = hasattr(model, "activation_checkpointing_enable")  # the older name warns where this one is
    enable = model.activation_checkpointing_enable if current else model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    return model


class Block(nn.Module):
    """Attention with two heads and a feed-forward part, both with layer norm before and a residual around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (rows, length, width)
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (width // 2) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A language model whose output is its loss. tied: the head is the embedding."""

    def __init__(self, width: int = 22, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # (rows, LENGTH) both
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Recomputing(TinyGPT):
    """Checkpoints its blocks itself: "inside" of their calls, "around" each, or "around all" with what is behind."""

    def __init__(self, where: str, use_reentrant: bool = False) -> None:
        super().__init__()
        self.where, self.use_reentrant = where, use_reentrant
        for block in self.blocks if where == "inside" else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        def run(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant) if self.where == "around" else block(x)
            return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

        x = self.embedding(ids) + self.position
        return checkpoint(run, x, use_reentrant=False) if self.where == "around all" else run(x)


class Mlp(nn.Module):
    """Layers of 7 x 7, far below a block of the flat buffer, so that all but one shard of each are empty."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(layers)))
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (rows, FEATURES), (rows, 3)
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return functional.mse_loss(self.last(x), y)


class Chain(nn.Module):
    """Blocks one after the other; the mean square of what comes out is the loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Explodes(nn.Module):
    """Its gradient is not finite where `factor` is 2."""

    factor = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum() * torch.where((x.detach() * 0 + self.factor) > 1, torch.inf, 1.0).mean()


def linear_chain(width: int, count: int) -> Chain:
    return Chain(*(nn.Linear(width, width) for _ in range(count)))


def tiny_gpt() -> nn.Module:
    return TinyGPT()


def short_gpt() -> nn.Module:
    """With one block: for what is of parameters and states, and not of blocks that follow each other."""
    return TinyGPT(layers=1)


def short_gpt_float64() -> nn.Module:
    return TinyGPT(layers=1).double()


def tied_gpt() -> nn.Module:
    return TinyGPT(tied=True)


def tied_gpt_float64() -> nn.Module:
    return TinyGPT(tied=True).double()


def mlp() -> nn.Module:
    return Mlp()


def tiny_gpt_float64() -> nn.Module:
    return TinyGPT().double()


def mlp_float64() -> nn.Module:
    return Mlp().double()


def token_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """(ids, targets) of step number `step`, (rows, LENGTH) each."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def same_rows(step: int, rows: int) -> tuple[Tensor, ...]:
    """As `token_batch`, with the same two rows on each rank: the mean of their gradients is exact."""
    return tuple(torch.cat([one] * (rows // 2)) for one in token_batch(step, 2))


def vector_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """(x, y) of step number `step`, (rows, FEATURES) and (rows, 3)."""
    generator = torch.Generator().manual_seed(2000 + step)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, 3, generator=generator)


def vector_batch_float64(step: int, rows: int) -> tuple[Tensor, Tensor]:
    x, y = vector_batch(step, rows)
    return x.double(), y.double()
