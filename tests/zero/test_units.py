"""Which modules form a unit, and which parameters belong to it."""

import pytest
import torch
from torch import Tensor, nn

from lowtide.zero.plan import REST, UnitPlan, plan_units


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


def described(units: list[UnitPlan]) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.params] for unit in units}


def test_repeated_blocks_are_units_and_the_rest_is_first() -> None:
    units = plan_units(Gpt(2))
    assert described(units) == {
        REST: ["embedding.weight"],
        "blocks.0": ["blocks.0.linear.weight", "blocks.0.linear.bias"],
        "blocks.1": ["blocks.1.linear.weight", "blocks.1.linear.bias"],
    }
    assert [unit.is_root for unit in units] == [True, False, False]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for model in (Gpt(), Gpt(tied=False), nn.Sequential(Block(), Block(), nn.Linear(4, 2)), nn.Linear(3, 3)):
        members = [id(param) for unit in plan_units(model) for _, param in unit.params]
        assert sorted(members) == sorted(id(param) for param in model.parameters())


def test_a_model_without_repeated_blocks_is_one_unit() -> None:
    assert described(plan_units(nn.Linear(2, 2))) == {REST: ["weight", "bias"]}
    different = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv1d(2, 2, 1))
    assert list(described(plan_units(different))) == [REST]


def test_the_outermost_list_counts() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert list(described(plan_units(model))) == [REST, "layers.0", "layers.1"]


def test_two_stacks_are_both_found() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(Block() for _ in range(2))
    model.decoder = nn.ModuleList(Block() for _ in range(2))
    names = list(described(plan_units(model)))
    assert names == [REST, "encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_a_small_list_beside_a_large_model_stays_in_the_rest() -> None:
    model = nn.Module()
    model.large = nn.Linear(100, 100)
    model.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    assert list(described(plan_units(model))) == [REST]


def test_a_block_that_stands_in_the_list_twice_is_one_unit() -> None:
    block = Block()
    assert list(described(plan_units(nn.Sequential(block, Block(), block)))) == [REST, "0", "1"]


def test_elements_without_parameters_are_no_units() -> None:
    assert list(described(plan_units(nn.Sequential(Block(), nn.ReLU(), Block())))) == [REST, "0", "2"]


def test_a_parameter_of_two_units_belongs_to_the_rest() -> None:
    model = Gpt(2)
    model.blocks[1].get_submodule("linear").weight = model.blocks[0].get_parameter("linear.weight")
    assert described(plan_units(model)) == {
        REST: ["embedding.weight", "blocks.0.linear.weight"],
        "blocks.0": ["blocks.0.linear.bias"],
        "blocks.1": ["blocks.1.linear.bias"],
    }


def test_a_parameter_tied_to_one_outside_belongs_to_the_rest() -> None:
    model = Gpt(2, tied=False)
    model.extra = nn.Module()
    model.extra.weight = model.blocks[1].get_parameter("linear.weight")
    assert "blocks.1.linear.weight" in described(plan_units(model))[REST]


@pytest.mark.parametrize(
    ("vocabulary", "tied", "ends_first", "expected"),
    [
        (1 << 19, False, False, [REST, "embedding", "blocks.0", "blocks.1", "head"]),
        (1 << 19, True, False, [REST, "blocks.0", "blocks.1"]),
        (1 << 17, False, False, [REST, "blocks.0", "blocks.1"]),  # less than a message is worth
        (1 << 19, False, True, [REST, "embedding", "blocks.0", "blocks.1"]),  # the head is used when it is not its turn
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
    assert list(described(plan_units(model))) == expected


def test_patterns_name_the_units() -> None:
    assert list(described(plan_units(Gpt(3), ["blocks.[02]"]))) == [REST, "blocks.0", "blocks.2"]
    assert list(described(plan_units(Gpt(2, tied=False), ["head", "blocks.*.linear"]))) == [
        REST,
        "blocks.0.linear",
        "blocks.1.linear",
        "head",
    ]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    text = 'found "layers.*", without a match; the model\'s top modules are: blocks, embedding, head'
    with pytest.raises(ValueError) as error:
        plan_units(Gpt(), ["layers.*"])
    assert "zero_optimization.units" in str(error.value) and text in str(error.value)


def test_units_that_contain_each_other_are_an_error() -> None:
    with pytest.raises(ValueError) as error:
        plan_units(Gpt(), ["blocks.*"])
    assert 'but "blocks.0" contains "blocks.0.linear"; name only one' in str(error.value)


def test_values_do_not_matter() -> None:
    with torch.device("meta"):
        model = Gpt()
    assert list(described(plan_units(model))) == [REST, "blocks.0", "blocks.1", "blocks.2"]
