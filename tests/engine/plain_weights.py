"""A model with everything that a file of weights must get right, and what tests of such files share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.engine.archive.named_state import NamedState
from tests.kit import models
from tests.kit.training import Case, differences as differences, share_of


class Adapted(nn.Linear):
    """A frozen layer with a low-rank addition that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(3, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(functional.linear(x, self.lora_A), self.lora_B)


class Everything(models.TinyGPT):
    """Tied, frozen, low-rank, 0-d and empty parameters; buffers of several dtypes, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__(width=22, layers=2, tied=True)
        for block in self.blocks:
            block.qkv = Adapted(22, 66)
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.position.requires_grad_(False)
        self.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return super().forward(ids, targets) * self.temperature + self.nothing.sum()


def engine_of(stage: int, config: dict[str, Any], seed: int = 0, steps: int = 1) -> Any:
    """An engine with Everything after some steps of training."""
    torch.manual_seed(seed)
    case = Case(Everything, models.token_batch, stage=stage, config=config)
    engine = lowtide.initialize(Everything(), case.as_config())
    for step in range(steps):
        engine.train_step(share_of(case.global_batch(step, engine.world_size)))
    return engine


def named_state(engine: Any) -> NamedState:
    runner = engine._runner
    return NamedState(engine.module, runner.passes.units, engine.optimizer, engine._mesh, runner.whole)


export, load_weights = lowtide.Engine.export, lowtide.Engine.load_weights


def saved_once(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict with each tied parameter under its first name alone."""
    return {name: value for name, value in state.items() if name != "head.weight"}
