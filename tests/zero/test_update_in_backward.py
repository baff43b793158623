"""update_in_backward never holds all gradients; that it changes no bit is asked in tests/laws."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import lowtide
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, refusal, settings, take_step, train, trained

IN_BACKWARD: dict[str, Any] = {"zero_optimization": {"update_in_backward": True}}


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_update_in_backward_holds_few_gradients(stage: int) -> None:
    """Eight layers, each a unit of one block for each shard."""
    case, seen = Case(partial(models.Mlp, 8), models.vector_batch, stage, config=IN_BACKWARD), list[int]()
    with trained(case, 0) as engine:
        for layer in engine.module.get_submodule("layers").children():
            layer.register_full_backward_hook(lambda module, *_: seen.append(engine.memory().gradient_bytes))
        for step in range(2):
            take_step(engine, case, step)
        full = sum(4 * shard.group.layout.padded_numel for shard in engine.optimizer.shards)
        assert max(seen) <= full / 2 and engine.memory().gradient_bytes == 0


class Poisoned(nn.Linear):
    """Gives a NaN to its weight's gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.where(x.sum() > 0, torch.tensor(float("nan")), torch.tensor(1.0))


def test_a_nan_says_that_other_parameters_were_updated_already() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Poisoned(4, 4))
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    nn.init.ones_(model[0].bias)  # type: ignore[arg-type]
    with lowtide.initialize(model, settings(**IN_BACKWARD), loss_fn=lambda output, batch: output.mean()) as engine:
        text = refusal(engine.train_step, (torch.ones(2, 4),), kind=RuntimeError)
    assert "step 1: expected finite gradients, found a NaN or infinite value in the gradient of '" in text
    assert "The parameters whose gradients are finite were updated already (update_in_backward)." in text


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_are_updated_in_part_are_not_used_until_a_load(stage: int, tmp_path: Path) -> None:
    case = Case(models.mlp, models.vector_batch, stage, config={**IN_BACKWARD, "bf16": {"enabled": True}})
    whole = train(case)
    with trained(case, 1) as engine:
        engine.save_checkpoint(tmp_path)
        loss, batch = engine(*case.share(engine, 2)), case.share(engine, 1)
        hook = engine.module.get_parameter("first.weight").register_hook(fail)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.train_step(batch)
        hook.remove()
        [text] = caught.value.__notes__
        for ask in (
            partial(engine.train_step, batch),
            partial(engine, *batch),
            partial(engine.eval_step, batch),
            partial(engine.backward, loss),
            loss.backward,
            partial(engine.save_checkpoint, tmp_path),
            partial(engine.load_state_dict, engine.state_dict()),
        ):
            assert refusal(ask, kind=StateError) == text
        engine.load_checkpoint(tmp_path)
        assert [take_step(engine, case, step).loss.item() for step in (1, 2)] == whole.losses[1:]


def test_an_interrupt_between_the_update_and_the_end_of_the_step_is_an_update_in_part() -> None:
    case = Case(models.mlp, models.vector_batch, config=IN_BACKWARD)
    with trained(case, 1) as engine:
        interrupt = patch.object(engine._steps._passes, "await_others", side_effect=KeyboardInterrupt)
        with interrupt, pytest.raises(KeyboardInterrupt):
            take_step(engine, case, 1)
        assert "had updated some parameters" in refusal(take_step, engine, case, 1, kind=StateError)
