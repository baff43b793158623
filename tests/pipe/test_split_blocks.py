"""Which blocks a model is found to have, and what is said where it has none."""

import re

import pytest
from torch import nn

from lowtide.pipe.split.blocks import find_blocks
from tests.kit import models
from tests.pipe.test_stage_hugging_face import builder
from tests.zero.containers import Dicts


def names(model: nn.Module) -> list[str]:
    return list(find_blocks(model))


def test_the_elements_of_a_module_list_are_the_blocks() -> None:
    assert names(models.TinyGPT()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_an_encoders_blocks_come_before_a_decoders() -> None:
    expected = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert names(builder("T5ForConditionalGeneration")()) == expected


def test_the_elements_with_parameters_of_a_sequential_model_are_the_blocks() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    assert names(model) == ["0", "2", "4"]


def test_lists_inside_blocks_and_small_lists_are_passed_over() -> None:
    experts = nn.ModuleList(nn.Sequential(*(nn.Linear(9, 9) for _ in range(3))) for _ in range(2))
    model = nn.ModuleDict({"experts": experts, "small": nn.ModuleList(nn.Linear(1, 1) for _ in range(2))})
    assert names(model) == ["experts.0", "experts.1"]


def test_of_a_container_the_blocks_are_what_runs_in_it() -> None:
    expected = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"]
    assert names(Dicts()) == expected


def test_a_block_that_stands_in_a_list_twice_is_one_block() -> None:
    layer = nn.Linear(3, 3)
    assert names(nn.ModuleList([layer, nn.Linear(3, 3), layer])) == ["0", "1"]


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Bilinear(3, 3, 3), "no ModuleList and no Sequential"),
        (
            nn.ModuleDict({"only": nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "rest": nn.Linear(3, 9)}),
            "'only' (Sequential of 1 x Linear, 25% of the parameters)",
        ),
        (
            nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Bilinear(3, 3, 1)),
            "'(the model)' (Sequential of 1 x Linear, 1 x LayerNorm, 1 x Bilinear, 100% of the parameters)",
        ),
        (nn.ModuleList([nn.ReLU()]), "'(the model)' (ModuleList of nothing with parameters, 0% of the parameters)"),
    ],
)
def test_a_model_without_repeated_blocks_is_an_error_that_says_what_was_found(model: nn.Module, found: str) -> None:
    total = sum(param.numel() for param in model.parameters())
    text = (
        f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
        "Sequential with repeated elements of the same class, which hold at least 5% of the model's "
        f"{total} parameters, found {found}; keep the repeated parts of the model in a single nn.ModuleList or "
        "nn.Sequential"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        find_blocks(model)
