"""Which modules form a unit, and which parameters belong to it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.zero.plan import ROOT, plan_units
from tests.kit.training import refusal
from tests.zero import containers


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Gpt(nn.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, num_blocks: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def with_parts(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Gpt()


def blocks(count: int) -> nn.Module:
    return nn.ModuleList(Block() for _ in range(count))


UNITS: list[tuple[Callable[[], nn.Module], list[str]]] = [
    (on_meta, ["blocks.0", "blocks.1", "blocks.2"]),
    (lambda: Gpt(2, tied=False), ["blocks.0", "blocks.1"]),
    (lambda: nn.Linear(2, 2), []),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv1d(2, 2, 1)), []),
    (lambda: nn.Sequential(Block(), Block(), nn.Linear(4, 2)), ["0", "1", "2"]),
    # The outermost list counts.
    (
        lambda: with_parts(layers=nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    (lambda: with_parts(up=blocks(2), down=blocks(2)), ["up.0", "up.1", "down.0", "down.1"]),
    # Small beside a large model.
    (lambda: with_parts(large=nn.Linear(100, 100), small=nn.ModuleList(nn.Linear(2, 2) for _ in range(4))), []),
    (lambda: nn.Sequential(block := Block(), Block(), block), ["0", "1"]),
    (lambda: nn.Sequential(Block(), nn.ReLU(), Block()), ["0", "2"]),
    (containers.Dicts, [f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")]),
    (containers.OwnClass, ["blocks.0.layer", "blocks.1.layer", "blocks.2.layer"]),
    (containers.OnlyParameters, []),
    (containers.Mixed, ["blocks.0", "blocks.2.0.0", "blocks.2.0.1", "blocks.2.1", "blocks.4", "blocks.5.0"]),
]


@pytest.mark.parametrize(("build", "names"), UNITS)
def test_units_are_what_runs_in_repeated_blocks_and_the_rest_is_first(
    build: Callable[[], nn.Module], names: list[str]
) -> None:
    """Every parameter is in exactly one."""
    model = build()
    units = plan_units(model)
    assert [unit.name for unit in units] == [ROOT, *names]
    assert [unit.is_root for unit in units] == [True] + [False] * len(names)
    members = [id(param) for unit in units for _, param in unit.params]
    assert sorted(members) == sorted(id(param) for param in model.parameters())


@pytest.mark.parametrize(
    ("vocabulary", "tied", "ends_first", "expected"),
    [
        (1 << 19, False, False, [ROOT, "embedding", "blocks.0", "blocks.1", "head"]),
        (1 << 19, True, False, [ROOT, "blocks.0", "blocks.1"]),
        (1 << 17, False, False, [ROOT, "blocks.0", "blocks.1"]),  # less than a message is worth
        (1 << 19, False, True, [ROOT, "embedding", "blocks.0", "blocks.1"]),  # the head is used when it is not its turn
    ],
)
def test_what_is_large_before_and_behind_the_blocks_is_a_unit(
    vocabulary: int, tied: bool, ends_first: bool, expected: list[str]
) -> None:
    with torch.device("meta"):
        model = Gpt(2, tied=False)
        model.embedding, model.head = nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary, bias=False)
        model.blocks = nn.ModuleList(Block(512) for _ in range(2))
    if tied:
        model.head.weight = model.embedding.weight
    if ends_first:
        model._modules["blocks"] = model._modules.pop("blocks")
    assert [unit.name for unit in plan_units(model)] == expected


def test_a_parameter_of_two_units_or_tied_to_one_outside_belongs_to_the_rest() -> None:
    model = Gpt(2)
    model.blocks[1].get_submodule("linear").weight = model.blocks[0].get_parameter("linear.weight")
    model.extra = nn.Module()
    model.extra.bias = model.blocks[1].get_parameter("linear.bias")
    assert {unit.name: [name for name, _ in unit.params] for unit in plan_units(model)} == {
        ROOT: ["embedding.weight", "blocks.0.linear.weight", "blocks.1.linear.bias"],
        "blocks.0": ["blocks.0.linear.bias"],
    }


@pytest.mark.parametrize(
    ("model", "patterns", "names"),
    [
        (Gpt(3), ["blocks.[02]"], ["blocks.0", "blocks.2"]),
        (Gpt(2, tied=False), ["head", "blocks.*.linear"], ["blocks.0.linear", "blocks.1.linear", "head"]),
        (
            containers.Dicts(),  # what runs in it
            ["blocks.[01]", "blocks.0.up", "last"],
            ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "last"],
        ),
    ],
)
def test_patterns_name_the_units(model: nn.Module, patterns: list[str], names: list[str]) -> None:
    assert [unit.name for unit in plan_units(model, patterns)] == [ROOT, *names]


@pytest.mark.parametrize(
    ("model", "pattern", "text"),
    [
        (Gpt(), "layers.*", 'found "layers.*", without a match; the model\'s top modules are: blocks, embedding, head'),
        (Gpt(), "blocks.*", 'but "blocks.0" contains "blocks.0.linear"; name either'),
        (
            containers.OnlyParameters(),
            "blocks.0",
            'expected modules with a forward, found "blocks.0", a ParameterDict that has none, '
            "nor do its children; name the parent whose forward reads its parameters",
        ),
    ],
)
def test_patterns_that_name_no_units_are_refused(model: nn.Module, pattern: str, text: str) -> None:
    found = refusal(plan_units, model, [pattern])
    assert found.startswith("zero_optimization.units: ") and text in found
