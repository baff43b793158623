"""What an engine has put on a model is gone when it is closed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import refusal, settings

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {}),
    "stage 3": (2, {"zero_optimization": {"stage": 3}}),
    "checkpointing": (1, {"activation_checkpointing": {"every": 1}}),
    "checkpointing and offload": (1, {"activation_checkpointing": {"every": 2, "offload": {"device": "cpu"}}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "zero bubble": (
        2,
        {
            "parallel": {"pipeline": 2},
            "pipeline": {"schedule": "zb-h1"},
            "gradient_accumulation_steps": 4,
            "activation_checkpointing": {"every": 1},
        },
    ),
}


def put_on(model: nn.Module) -> list[str]:
    """Everything about the modules and parameters of a model that an engine might leave behind."""
    found = []
    for name, module in model.named_modules():
        own = {
            key: len(value)
            if "hooks" in key
            else sorted(value)
            if key == "_non_persistent_buffers_set"
            else repr(value)
            for key, value in module.__dict__.items()
            if key not in ("_parameters", "_buffers", "_modules") and "Absent" not in type(value).__name__
        }
        found.append(f"{name} {type(module)!r} {own}")
    for name, param in model.named_parameters():
        hooks = (param._backward_hooks or {}, param._post_accumulate_grad_hooks or {})
        found.append(f"{name} {[len(some) for some in hooks]}")
    return found


def train_and_close(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    model = models.tiny_gpt()
    before = put_on(model)
    with lowtide.initialize(model, settings(**config)) as engine:
        rows = 2 * (engine.config.gradient_accumulation_steps or 1)
        engine.train_step(models.token_batch(engine.data_rank, rows))
    left = {line.split(" ", 1)[0] for line in put_on(model)}  # without what another stage has
    return [line for line in before if line.split(" ", 1)[0] in left], put_on(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_left_on_the_model(ranks: RankPool, name: str) -> None:
    world_size, config = CONFIGS[name]
    for before, after in ranks(world_size, train_and_close, config):
        assert after == before


class CountingBlock(nn.Linear):
    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return super().forward(x).relu()


def test_checkpointing_does_not_nest_in_the_next_engine() -> None:
    model: Any = models.Chain(CountingBlock(4, 4), CountingBlock(4, 4))
    for every, expected in ((1, 2), (1, 2), (0, 1)):
        for block in model.blocks:
            block.num_forwards = 0
        with lowtide.initialize(model, settings(activation_checkpointing={"every": every})) as engine:
            engine.train_step(torch.ones(2, 4))
        assert [block.num_forwards for block in model.blocks] == [expected] * 2


def test_an_initialize_that_fails_leaves_nothing() -> None:
    model = models.tiny_gpt()
    before = put_on(model)
    config = settings(optimizer=None, kernels={"fuse_modules": True}, gradient_clipping=1.0)
    assert "optimizer: gradient_clipping needs an optimizer, found none" in refusal(lowtide.initialize, model, config)
    assert put_on(model) == before


def test_a_model_that_an_engine_has_divided_is_refused() -> None:
    model = models.tiny_gpt()
    lowtide.initialize(model, settings(3)).close()
    text = refusal(lowtide.initialize, model, settings(3))
    assert "whose values an earlier engine released; build the model again" in text
