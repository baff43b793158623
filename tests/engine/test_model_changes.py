"""What is changed on the model behind the engine's back is an error that names the parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests import models
from tests.ranks import RankPool
from tests.zero.training import Case, share_of


def add(model: Any) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def replace(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(models.VOCAB, 22))


def freeze(model: Any) -> None:
    model.blocks[1].up.bias.requires_grad_(False)


def unfreeze(model: Any) -> None:
    model.position.requires_grad_(True)


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.norm.bias.add_(1.0)


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (add, r"parameter 'extra' was added or replaced after lowtide.initialize, .* then call initialize again"),
    (replace, r"parameter 'head.weight' was added or replaced after lowtide.initialize"),
    (freeze, r"parameter 'blocks.1.up.bias': expected requires_grad=True as at lowtide.initialize, found False"),
    (unfreeze, r"parameter 'position': expected requires_grad=False as at lowtide.initialize, found True"),
]


def change_and_step(change: Callable[[Any], None], stage: int, config: dict[str, Any], is_classic: bool) -> None:
    case = Case(models.tiny_gpt, models.token_batch, stage, config=config)
    model: Any = case.build()
    model.position.requires_grad_(False)
    engine = lowtide.initialize(model, case.as_config())
    batch = share_of(case.global_batch(0, engine.world_size))
    engine.train_step(batch)
    change(model)
    engine(*batch) if is_classic else engine.train_step(batch)


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_added_frozen_or_unfrozen_is_named(
    change: Callable[[Any], None], words: str, stage: int
) -> None:
    for is_classic in (False, True):
        with pytest.raises(ValueError, match=words):
            change_and_step(change, stage, {}, is_classic)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_change_in_place_of_bf16_weights_is_named(stage: int) -> None:
    words = r"parameter 'norm.bias' was changed in place.*inside `with engine.gathered\(parameter, modify=True\):`"
    with pytest.raises(ValueError, match=words):
        change_and_step(change_in_place, stage, {"bf16": {"enabled": True}}, False)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_change_in_place_of_shared_parameters_is_named(ranks: RankPool, stage: int) -> None:
    for failure in ranks.fails(2, change_and_step, change_in_place, stage, {}, False):
        assert failure.kind == "ValueError" and "parameter 'norm.bias' was changed in place" in failure.text


@pytest.mark.parametrize("route", ["shared_memory", "sockets"])
def test_a_change_in_place_of_a_released_parameter_is_named(ranks: RankPool, route: str) -> None:
    for failure in ranks.fails(2, change_and_step, change_in_place, 3, {"communication": {"route": route}}, False):
        assert failure.kind == "ReleasedParameterError" and "parameter 'norm.bias' is released" in failure.text
