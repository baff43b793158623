"""Ranks that share layers draw the same numbers where they compute the same, and know if they do not."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel import models_of_others as others
from tests.parallel.adapters import LAYERS, adapted
from tests.parallel.trainings import AGAIN, PARTS, TENSOR, Mixer, dropping, mixed, split_config


def what_is_dropped(config: dict[str, Any]) -> tuple[list[list[bool]], float]:
    """By call of a dropout: which elements are zero; and the loss of a second step."""
    engine = lowtide.initialize(dropping(), split_config(**config))
    found: list[list[bool]] = []

    def note(part: nn.Module, args: Any, output: Tensor) -> None:
        if part.training:
            found.append((output == 0).view(-1).tolist())

    for part in engine.module.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(note)
    torch.manual_seed(0)
    engine.train_step((mixed(),))
    loss = engine.train_step((mixed(),)).loss.item()
    engine.close()
    return found[:4], loss


@pytest.mark.parametrize("config", [TENSOR, PARTS])
def test_dropout_differs_where_ranks_have_parts_and_is_the_same_when_recomputed(
    ranks: RankPool, config: dict[str, Any]
) -> None:
    """Between splits each rank has half of the columns; beside them half of the tokens, or all."""
    (first, loss), (second, other_loss) = ranks(2, what_is_dropped, config)
    assert [len(one) for one in first] == [2 * 6 * 32, 2 * (3 if config == PARTS else 6) * 8] * 2
    for call, (one, other) in enumerate(zip(first, second, strict=True)):
        assert any(one) and (one != other) == (call % 2 == 0 or config == PARTS)
    assert first[0] != first[2] and first[1] != first[3]
    assert loss == other_loss == ranks(2, what_is_dropped, config | AGAIN)[0][1]


def with_adapters() -> nn.Module:
    return adapted(others.llama(), LAYERS, lora_dropout=0.4)


DROPPING: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (others.dropping_gpt2, TENSOR | {"zero_optimization": {"stage": 3}}),
    (partial(others.bloom, rate=0.3), PARTS),  # what all compute, beside attention
    (with_adapters, TENSOR),  # matrices that all have
]


def losses_with_dropout() -> list[list[float]]:
    found = []
    for build, config in DROPPING:
        for again in ({}, AGAIN):
            torch.manual_seed(0)
            with lowtide.initialize(build(), split_config(**config, **again)) as engine:
                found.append([engine.train_step(others.tokens(step, 2)).loss.item() for step in range(2)])
    return found


def test_dropout_of_models_of_others_is_the_same_on_all_and_in_a_recomputation(ranks: RankPool) -> None:
    """Else the first backward finds other gradients of what ranks have alike."""
    found, others_have = ranks(2, losses_with_dropout)
    assert others_have == found and len({loss for losses in found for loss in losses}) >= 2 * len(DROPPING)
    for kept, recomputed in zip(found[::2], found[1::2], strict=True):
        assert kept == pytest.approx(recomputed, rel=1e-9)


class Hidden(Mixer):
    """A dropout that no module and no attribute shows."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5).square().mean()


class Fails(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError
        return x


def losses_of_other_seeds() -> list[float]:
    """With seeds of the ranks: of a hidden dropout, of none at all, and behind an error between two splits."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    with lowtide.initialize(Hidden(), split_config()) as engine:
        found = [engine.train_step((mixed(),)).loss.item()]
    with lowtide.initialize(dropping(0.0), split_config()) as engine:
        torch.manual_seed(rank)
        found.append(engine.train_step((mixed(),)).loss.item())
    model = dropping()
    model.blocks[0].inner = nn.Sequential(nn.Dropout(0.5), Fails())
    with lowtide.initialize(model, split_config()) as engine:
        engine.train_step((mixed(),))
        model.blocks[0].inner[1].fails = True
        with pytest.raises(ArithmeticError):
            engine.train_step((mixed(),))
        model.blocks[0].inner[1].fails = False
        return [*found, engine.train_step((mixed(),)).loss.item()]


def test_ranks_of_other_seeds_draw_the_same(ranks: RankPool) -> None:
    first, second = ranks(2, losses_of_other_seeds)
    assert first == second


def seeded_apart(pipeline: int) -> list[str]:
    """One rank seeds again, then all do alike."""
    torch.manual_seed(3)
    batch = (mixed(rows=4),)
    engine = lowtide.initialize(
        dropping(), split_config({"tensor": 2, "pipeline": pipeline}, gradient_accumulation_steps=2)
    )
    engine.train_step(batch)
    found = []
    if engine.rank == 1:
        torch.manual_seed(4)
    engine.eval_step(batch)  # which draws nothing
    for _ in range(2):
        try:
            engine.train_step(batch)
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
        torch.manual_seed(5)
    engine.close()
    return found


@pytest.mark.parametrize("pipeline", [1, 2])
def test_ranks_that_are_seeded_apart_are_told(ranks: RankPool, pipeline: int) -> None:
    for first, second in ranks(2 * pipeline, seeded_apart, pipeline):
        assert first.startswith("random generators: expected the same state on the 2 ranks of parallel.tensor, since")
        assert second == "trained"
