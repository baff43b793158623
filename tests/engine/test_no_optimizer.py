"""An engine without an optimizer computes, saves and loads, and says in words that it does not train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import refusal, settings, share_of

NVME = {"device": "nvme"}
CONFIG = settings(optimizer=None)


def build() -> nn.Module:
    torch.manual_seed(0)
    return models.tiny_gpt()


def compute(stage: int, config: dict[str, Any], folder: Path) -> list[Any]:
    """What a teacher gives, in several ways, and how many of its bytes are not parameters."""
    batch = share_of(models.token_batch(0, 4))
    with lowtide.initialize(build(), settings(stage, optimizer=None, zero_optimization=config)) as engine:
        loss, mean = engine(*batch), engine.eval_step(batch)
        assert not loss.requires_grad and engine.lr == 0
        memory = engine.memory()
        engine.export(folder / "plain")
        engine.save_checkpoint(folder / "saved")
        state = engine.state_dict()
        weight = engine.module.get_parameter("head.weight")
        with engine.gathered(weight, modify=True):
            weight.mul_(2)
        assert engine(*batch) != loss
        engine.load_checkpoint(folder / "saved")
        restored = engine(*batch)
        engine.load_weights(folder / "plain")
        return [loss, restored, engine(*batch), mean, memory.gradient_bytes + memory.optimizer_bytes, state]


def test_it_computes_what_torch_does(ranks: RankPool, tmp_path: Path) -> None:
    model = build()
    losses = [model(*(part.chunk(2)[rank] for part in models.token_batch(0, 4))) for rank in range(2)]
    for stage, config in ((0, {}), (1, {}), (3, {}), (3, {"offload_param": NVME | {"nvme_path": str(tmp_path)}})):
        found = ranks(2, compute, stage, config, tmp_path / f"{stage} {len(config)}")
        for (*own, mean, others, _), expected in zip(found, losses, strict=True):
            torch.testing.assert_close(own, [expected.detach()] * 3)
            torch.testing.assert_close(mean, torch.stack(losses).mean().detach())
            assert others == 0
        assert all(torch.equal(value, found[0][-1][name]) for name, value in model.state_dict().items())


def distill(stage: int) -> dict[str, Any]:
    """A student of a teacher that is another engine."""
    batch = share_of(models.vector_batch(0, 4))
    torch.manual_seed(0)
    with (
        lowtide.initialize(models.mlp(), settings(stage, optimizer=None)) as teacher,
        lowtide.initialize(models.mlp(), settings(stage)) as student,
    ):
        for _ in range(2):
            student.backward((student(*batch) - 2 * teacher(*batch)).square())
            student.step()
        return student.state_dict()


def test_a_teacher_beside_a_student(ranks: RankPool) -> None:
    at_0, at_3 = (ranks(2, distill, stage)[0] for stage in (0, 3))
    assert all(torch.equal(value, at_3[name]) for name, value in at_0.items())


def test_it_says_that_it_does_not_train() -> None:
    model, batch = build(), models.token_batch(0, 2)
    with lowtide.initialize(model, CONFIG) as engine:
        for name, given in {"train_step": [batch], "backward": [engine(*batch)], "step": []}.items():
            words = f"engine.{name}: expected an engine with an optimizer, found an engine without; put an optimizer in"
            assert words in refusal(getattr(engine, name), *given)
        assert not any(param.requires_grad for param in model.parameters())
    assert all(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer"),
        ({"zero_optimization": {"update_in_backward": True}}, "zero_optimization.update_in_backward"),
    ],
)
def test_a_config_of_a_training_and_a_scheduler_need_one(more: dict[str, Any], key: str) -> None:
    text = refusal(lowtide.initialize, build(), settings(optimizer=None, **more))
    assert text.startswith(f"optimizer: {key} needs an optimizer, found none; set it in the config, for example")
    text = refusal(lowtide.initialize, build(), CONFIG, lr_scheduler=torch.optim.lr_scheduler.LinearLR)
    assert "lr_scheduler: expected an optimizer too, in the config or passed" in text
