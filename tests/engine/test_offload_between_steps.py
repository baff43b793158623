"""Saving, loading and looking between steps and within them, with state that rests in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.step.step_sums import NonFiniteGradientError
from tests.kit.models import mlp, short_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, share_of


def config_for(folder: Path, timing: str, stage: int = 1, **changes: Any) -> dict[str, Any]:
    place: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder)}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": place}
    if timing == "in backward":
        zero["update_in_backward"] = True
    else:
        zero["offload_optimizer"] = {**place, "overlap": timing}
    values = Case(tiny_gpt, token_batch).as_config()
    return {**values, "zero_optimization": zero, **changes}


def saved_and_loaded(config: dict[str, Any], folder: Path) -> tuple[list[float], list[float]]:
    """Losses after a save, and of an engine that was loaded from it."""
    losses = []
    for is_second in (False, True):
        torch.manual_seed(0)
        engine = lowtide.initialize(short_gpt(), config)
        if is_second:
            engine.load_checkpoint(folder / "saved")
        for step in range(engine.global_step, 4):
            result = engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
            losses.append(result.loss.item())
            if step == 1 and not is_second:
                engine.save_checkpoint(folder / "saved")
                engine.export(folder / "weights", dtype="fp32")
        engine.close()
    return losses[2:4], losses[4:]


@pytest.mark.parametrize(
    ("precision", "timing"),
    [("bf16", "none"), ("fp32", "speculative"), ("bf16", "speculative"), ("fp32", "in backward")],
)
def test_every_timing_saves_exports_and_loads(ranks: RankPool, tmp_path: Path, timing: str, precision: str) -> None:
    config = config_for(tmp_path, timing, bf16={"enabled": precision == "bf16"})
    for before, after in ranks(2, saved_and_loaded, config, tmp_path):
        assert before == after


class Sometimes(nn.Module):
    """Its last layer has a gradient that is not finite while `is_bad`; those of the others are finite."""

    is_bad = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = (x * self.last.detach()).square().mean()
        return loss + self.last.sum() * (float("inf") if self.is_bad else 0.0)


def evaluations(config: dict[str, Any]) -> tuple[float, float]:
    """The loss before and after a step that was taken back."""
    torch.manual_seed(0)
    model = Sometimes()
    engine = lowtide.initialize(model, config)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    engine.train_step((x,))
    before = engine.eval_step((x,)).item()
    model.is_bad = True
    with pytest.raises(NonFiniteGradientError, match="No parameter was updated"):
        engine.train_step((x,))
    model.is_bad = False
    after = engine.eval_step((x,)).item()
    engine.close()
    return before, after


@pytest.mark.parametrize("stage", [1, 3])
def test_a_bad_step_leaves_half_precision_parameters(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    config = config_for(tmp_path, "speculative", stage, bf16={"enabled": True}, optimizer=ADAMW)
    config["train_micro_batch_size_per_gpu"] = 4
    for before, after in ranks(2, evaluations, config):
        assert before == after


def test_a_caller_s_own_optimizer_cannot_be_taken_back() -> None:
    zero = {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}
    with pytest.raises(
        ValueError, match=r'"speculative" needs an optimizer of the config, whose updates can be undone'
    ):
        lowtide.initialize(mlp(), {"zero_optimization": zero}, optimizer=torch.optim.NAdam)


def losses_with_a_look_between(config: dict[str, Any], looks: bool) -> list[float]:
    """Losses of the classic form; with a forward of its own between backward and step."""
    torch.manual_seed(0)
    engine = lowtide.initialize(mlp(), config)
    losses = []
    for step in range(3):
        batch = share_of(vector_batch(step, 2 * engine.world_size))
        loss = engine(*batch)
        engine.backward(loss)
        if looks:
            engine(*batch)
        losses.append(engine.step().loss.item())
    engine.close()
    return losses


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_between_backward_and_step_changes_nothing(
    ranks: RankPool, tmp_path: Path, rests: bool, world_size: int
) -> None:
    config = Case(mlp, vector_batch, stage=3, config={"communication": {"transport": "auto"}}).as_config()
    if rests:
        config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    elif world_size > 1:
        config["communication"] = {"transport": "sockets"}
    expected = ranks(world_size, losses_with_a_look_between, config, False)
    assert ranks(world_size, losses_with_a_look_between, config, True) == expected


def loss_after_loading(config: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Of the next forward: when parameters were full while they were loaded, and when they were not."""
    found = []
    batch = share_of(vector_batch(0, 2 * int(torch.distributed.get_world_size())))
    for is_full in (False, True):
        torch.manual_seed(int(is_full))
        engine = lowtide.initialize(mlp(), config)
        if is_full:
            engine(*batch)  # the rest and the last block stay full for a backward that never comes
            engine.load_checkpoint(folder)
        else:
            engine.train_step(batch)
            engine.save_checkpoint(folder)
        found.append(engine.eval_step(batch).item())
        engine.close()
    return found[0], found[1]


def test_full_parameters_are_loaded_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    config = Case(mlp, vector_batch, stage=3, config={"communication": {"transport": "sockets"}}).as_config()
    for saved, loaded in ranks(2, loss_after_loading, config, tmp_path):
        assert saved == loaded


def losses_around_a_load(config: dict[str, Any], folder: Path) -> tuple[list[float], str]:
    """Losses of steps after loads in the middle of a step, and the error of a save there."""
    torch.manual_seed(0)
    engine = lowtide.initialize(mlp(), config)
    batch = share_of(vector_batch(0, 2 * engine.world_size))
    engine.train_step(batch)
    engine.save_checkpoint(folder)
    losses = []
    for _ in range(2):
        engine.backward(engine(*batch))
        with pytest.raises(
            ValueError, match="save_checkpoint: expected a call between steps, found 1 of 1 microbatches"
        ) as error:
            engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        losses.append(engine.train_step(batch).loss.item())
        engine.load_checkpoint(folder)
    engine.close()
    return losses, str(error.value)


@pytest.mark.parametrize("timing", ["none", "speculative"])
def test_a_load_in_the_middle_of_a_step_is_whole(ranks: RankPool, tmp_path: Path, timing: str) -> None:
    config = {**config_for(tmp_path, timing, stage=3), "train_micro_batch_size_per_gpu": 2}
    for (first, second), _ in ranks(2, losses_around_a_load, config, tmp_path / "saved"):
        assert first == second
