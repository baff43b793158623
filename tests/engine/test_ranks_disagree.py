"""Ranks that were given different configs or models find out at the start, and show both."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from tests.kit.ranks import RankPool

CONFIG: dict[str, Any] = {"optimizer": {"type": "sgd"}, "gradient_clipping": 1.0}


def with_other_config() -> None:
    rank = dist.get_rank()
    clipping = {"gradient_clipping": 2.0} if rank == 1 else {}
    lowtide.initialize(nn.Linear(3, 2), {**CONFIG, **clipping})


def with_another_stage_and_optimizer() -> None:
    rank = dist.get_rank()
    params = {"lr": 0.1, "momentum": 0.5} if rank == 1 else {"lr": 0.1}
    optimizer = {"type": "sgd", "params": params} if rank < 2 else {"type": "lion"}
    lowtide.initialize(nn.Linear(3, 2), {"optimizer": optimizer, "zero_optimization": {"stage": 1 + rank}})


def with_other_shape() -> None:
    lowtide.initialize(nn.Linear(3, 2 + dist.get_rank()), CONFIG)


def with_another_layer() -> None:
    layers = [nn.Linear(3, 3) for _ in range(1 + dist.get_rank())]
    lowtide.initialize(nn.Sequential(*layers), CONFIG)


def with_other_dtype() -> None:
    lowtide.initialize(nn.Linear(3, 2).to([torch.float32, torch.float64][dist.get_rank()]), CONFIG)


def with_frozen_weight() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(dist.get_rank() == 0)
    lowtide.initialize(model, CONFIG)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (with_other_config, "different configs: gradient_clipping: rank 0 has 1.0, rank 1 has 2.0."),
        (
            with_another_stage_and_optimizer,
            "different configs: zero_optimization.stage: rank 0 has 1, rank 1 has 2; optimizer.params.momentum: "
            "rank 0 has 0.0, rank 1 has 0.5. All",
        ),
        (
            with_other_shape,
            "different models: weight: rank 0 has (2, 3) torch.float32, rank 1 has (3, 3) torch.float32",
        ),
        (with_another_layer, "different models: 1.weight: rank 0 has nothing, rank 1 has (3, 3) torch.float32"),
        (with_other_dtype, "weight: rank 0 has (2, 3) torch.float32, rank 1 has (2, 3) torch.float64"),
        (with_frozen_weight, "weight: rank 0 has (2, 3) torch.float32, rank 1 has (2, 3) torch.float32 frozen"),
    ],
)
def test_both_sides_are_shown_on_every_rank(ranks: RankPool, function: Any, text: str) -> None:
    for error in ranks.fails(2, function):
        assert error.kind == "RuntimeError" and "the ranks have " in error.text and text in error.text
        assert "All ranks must pass the same" in error.text
