"""The model and the loops with which DeepSpeed 0.19.8 has recorded what lies in `data`: see data/README.md."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed.pipe import LayerSpec, PipelineModule

DATA = Path(__file__).parent / "data"
ROWS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.c = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        for layer in self.b:
            x = x + torch.tanh(layer(x))
        return functional.mse_loss(self.c(x), y)


def config(stage: int, **others: Any) -> dict[str, Any]:
    """Accumulates 2 microbatches, warms up for 5 steps; clipping and decay are left to DeepSpeed's defaults."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
        **others,
    }


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(rank: int, count: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)) for _ in range(count)
    ]


def train(engine: Any, rank: int, count: int = 24) -> list[float]:
    """The losses of so many microbatches on this rank."""
    losses = []
    for x, y in batches(rank, count):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.l = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.l(x))


def layers(num_stages: int = 2) -> PipelineModule:
    """Each layer with a seed of its own."""
    specs = [LayerSpec(nn.Linear, 8, 16), torch.tanh, *(LayerSpec(Block, 16) for _ in range(4))]
    return PipelineModule(
        [*specs, LayerSpec(nn.Linear, 16, 4)], num_stages, loss_fn=functional.mse_loss, seed_layers=True
    )


def engine_of(stage: int, **others: Any) -> Any:
    model = net()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, **others))[0]
