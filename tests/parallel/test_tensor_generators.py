"""Ranks that share layers draw the same numbers, or are told that they do not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_tensor_ranks import Dropping, config_of

BATCH = (torch.ones(4, 8),)


def seeded_apart(pipeline: int) -> list[str]:
    """One rank seeds again, then all do alike."""
    torch.manual_seed(3)
    config = config_of(
        parallel={"tensor": 2, "pipeline": pipeline},
        gradient_accumulation_steps=2,
    )
    engine = lowtide.initialize(Dropping(), config)
    engine.train_step(BATCH)
    found = []
    if engine.rank == 1:
        torch.manual_seed(4)
    engine.eval_step(BATCH)  # which draws nothing
    for seed in (5, None):
        try:
            engine.train_step(BATCH)
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
        if seed is not None:
            torch.manual_seed(seed)
    engine.close()
    return found


@pytest.mark.parametrize("pipeline", [1, 2])
def test_ranks_that_are_seeded_apart_are_told(ranks: RankPool, pipeline: int) -> None:
    for first, second in ranks(2 * pipeline, seeded_apart, pipeline):
        assert first.startswith("random generators: expected the same state on the 2 ranks of parallel.tensor, since")
        assert second == "trained"


def without_dropout() -> float:
    model = Dropping()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    engine = lowtide.initialize(model, config_of())
    torch.manual_seed(engine.rank)
    loss = float(engine.train_step((BATCH[0][:2],)).loss)
    engine.close()
    return loss


def test_a_model_that_draws_nothing_may_be_seeded_by_rank(ranks: RankPool) -> None:
    first, second = ranks(2, without_dropout)
    assert first == second


class Fails(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError
        return x


def failing_once() -> float:
    """Between a column and a row split, where ranks draw numbers of their own."""
    model: Any = Dropping()
    model.layers[0].inner = nn.Sequential(nn.Dropout(0.5), Fails())
    engine = lowtide.initialize(model, config_of())
    engine.train_step((BATCH[0][:2],))
    model.layers[0].inner[1].fails = True
    with pytest.raises(ArithmeticError):
        engine.train_step((BATCH[0][:2],))
    model.layers[0].inner[1].fails = False
    loss = float(engine.train_step((BATCH[0][:2],)).loss)
    engine.close()
    return loss


def test_they_agree_again_after_an_error_between_splits(ranks: RankPool) -> None:
    first, second = ranks(2, failing_once)
    assert first == second
