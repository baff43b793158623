"""Which blocks a model is found to have, and what is said where it has none."""

import pytest
from torch import nn

from lowtide.pipe.split.blocks import find_blocks
from tests.kit import models
from tests.kit.training import refusal
from tests.pipe.hugging_face import builder
from tests.zero.containers import Dicts


def linears(*sizes: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(size, size) for size in sizes)


def experts_beside_a_small_list() -> nn.Module:
    experts = nn.ModuleList(nn.Sequential(*linears(9, 9, 9)) for _ in range(2))
    return nn.ModuleDict({"experts": experts, "small": linears(1, 1)})


def one_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.ModuleList([layer, nn.Linear(3, 3), layer])


FOUND: dict[str, tuple[nn.Module, list[str]]] = {
    "a list": (models.TinyGPT(), ["blocks.0", "blocks.1", "blocks.2"]),
    "an encoder before a decoder": (
        builder("T5ForConditionalGeneration")(),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "elements with parameters of a sequential": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)),
        ["0", "2", "4"],
    ),
    "no lists inside blocks": (experts_beside_a_small_list(), ["experts.0", "experts.1"]),
    "what runs in a container": (Dicts(), [f"blocks.{at}.{part}" for at in range(3) for part in ("up", "down")]),
    "a block that stands in a list twice": (one_twice(), ["0", "1"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found(name: str) -> None:
    model, names = FOUND[name]
    assert list(find_blocks(model)) == names


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
    assert refusal(find_blocks, model) == (
        f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
        "Sequential with repeated elements of the same class, which hold at least 5% of the model's "
        f"{total} parameters, found {found}; keep the repeated parts of the model in a single nn.ModuleList or "
        "nn.Sequential"
    )
