"""Blocks that are never called, but the modules in them: every stage trains them alike, and units are what runs."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.zero.units import REST, plan_units
from tests import models
from tests.ranks import RankPool
from tests.zero.training import Case, assert_close, train_all, train_plainly

WIDTH = 47


class Net(nn.Module):
    """A list of blocks between two layers, in float64. `run` says how a block's parts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, WIDTH)
        self.blocks = nn.ModuleList(self.block(index) for index in range(3))
        self.last = nn.Linear(WIDTH, 3)
        self.change()
        self.double()

    def block(self, index: int) -> nn.Module: ...

    def change(self) -> None: ...

    def run(self, block, x: Tensor) -> Tensor: ...  # type: ignore[no-untyped-def]  # a module of another class in each

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + self.run(block, x)
        return functional.mse_loss(self.last(x), y)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Dicts(Net):
    """A norm, which is small, stands before each layer."""

    def block(self, index: int) -> nn.Module:
        return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": linear(), "act": nn.GELU(), "down": linear()})

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block["down"](block["act"](block["up"](block["norm"](x))))


class Lists(Net):
    """As x-transformers has them: norms of which some are None, what is computed, and what adds it."""

    def block(self, index: int) -> nn.Module:
        return nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), None]), linear(), nn.Identity()])

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (before, after), layer, residual = block
        x = residual(layer(before(x)))
        return x if after is None else after(x)


class ListsOfBlocks(Net):
    """One, two and three blocks."""

    def block(self, index: int) -> nn.Module:
        return nn.ModuleList(models.Block(WIDTH - 1) for _ in range(index + 1))

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        for layer in block:
            x = torch.cat([layer(x[:, None, 1:])[:, 0], x[:, :1]], -1)
        return x


class Loose(nn.Module):
    """A class without a forward, whose own parameters are read by the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.layer = linear()
        self.more = nn.ParameterList([torch.zeros(WIDTH)])


class OwnClass(Net):
    def block(self, index: int) -> nn.Module:
        return Loose()

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block.layer(x) * block.scale + block.more[0]


class OnlyParameters(Net):
    """Nothing in the blocks is ever called."""

    def block(self, index: int) -> nn.Module:
        return nn.ParameterDict({"weight": 0.1 * torch.randn(WIDTH, WIDTH)})

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return functional.linear(x, block["weight"])


class Mixed(Net):
    """Containers beside what is called, None, and what has no parameters; and a list without anything."""

    def change(self) -> None:
        inner = nn.ModuleDict({"0": nn.ModuleList([linear(), linear()]), "1": linear(), "none": nn.ModuleList()})
        blocks = [linear(), None, inner, nn.Identity(), linear(), nn.ModuleList([nn.Sequential(linear(), nn.Tanh())])]
        self.blocks = nn.ModuleList(blocks)  # type: ignore[arg-type]  # torch takes None, and says so nowhere
        self.nothing = nn.ModuleList()
        self.register_module("none", None)

    def block(self, index: int) -> nn.Module:
        return nn.Identity()

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if block is None:
            return x
        if isinstance(block, nn.ModuleDict):
            return block["1"](block["0"][1](block["0"][0](x)))
        return block[0](x) if isinstance(block, nn.ModuleList) else block(x)


class OneForAll(Net):
    """The same module in every block, as ALBERT shares its layers."""

    def block(self, index: int) -> nn.Module:
        self.shared = self.shared if index else linear()
        return nn.ModuleDict({"shared": self.shared, "own": linear()})

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block["own"](block["shared"](x))


class TwoLists(Net):
    """The same blocks in a second list."""

    def block(self, index: int) -> nn.Module:
        return nn.ModuleList([linear()])

    def change(self) -> None:
        self.others = nn.ModuleList(reversed(list(self.blocks)))

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block[0](x)


class Backwards(Net):
    """What is registered first runs last."""

    def block(self, index: int) -> nn.Module:
        return nn.ModuleDict({"down": linear(), "up": linear()})

    def run(self, block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block["down"](torch.tanh(block["up"](x)))


UNITS: dict[Callable[[], nn.Module], list[str]] = {
    Dicts: ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"],
    Lists: ["blocks.0.1", "blocks.1.1", "blocks.2.1"],
    ListsOfBlocks: ["blocks.0.0", "blocks.1.0", "blocks.1.1", "blocks.2.0", "blocks.2.1", "blocks.2.2"],
    OwnClass: ["blocks.0.layer", "blocks.1.layer", "blocks.2.layer"],
    OnlyParameters: [],
    Mixed: ["blocks.0", "blocks.2.0.0", "blocks.2.0.1", "blocks.2.1", "blocks.4", "blocks.5.0"],
    OneForAll: ["blocks.0.shared", "blocks.0.own", "blocks.1.own", "blocks.2.own"],
    TwoLists: ["blocks.0.0", "blocks.1.0", "blocks.2.0"],
    Backwards: ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up", "blocks.2.down", "blocks.2.up"],
}


@pytest.mark.parametrize("kind", UNITS, ids=lambda kind: kind.__name__)
def test_units_are_what_runs_in_containers(kind: Callable[[], nn.Module]) -> None:
    rest, *blocks = plan_units(kind())
    assert rest.name == REST and [unit.name for unit in blocks] == UNITS[kind]


def test_containers_train_as_with_plain_torch(ranks: RankPool) -> None:
    cases = [Case(kind, models.vector_batch_float64, clip=0.05) for kind in UNITS]
    sockets = {"communication": {"route": "sockets"}}
    grid = [at for case in cases for at in (case, case.at(3), case.at(3, config=sockets))]
    outcomes = iter(ranks(2, train_all, grid)[0])
    for case in cases:
        expected = train_plainly(case, 2)
        for _ in range(3):
            assert_close(next(outcomes), expected, 1e-10, 1e-10, case.build.__name__)


def called_by_itself() -> list[float]:
    """Sums of what parts of the models give outside of the models' own forward."""
    sums = []
    for kind in (Dicts, Readers):
        engine = lowtide.initialize(kind(), {"optimizer": {"type": "sgd"}, "zero_optimization": {"stage": 3}})
        with torch.no_grad():
            x = torch.ones(1, WIDTH, dtype=torch.float64)
            part = engine.module.blocks[1]["up"] if kind is Dicts else engine.module.reader
            sums.append(part(x).sum().item())
        engine.close()
    return sums


class Reader(nn.Module):
    """Its forward reads parameters of containers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH)])
        self.more = nn.ModuleDict({"inner": nn.ParameterDict({"shift": torch.zeros(WIDTH)})})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] + self.more["inner"]["shift"]


class Readers(Dicts):
    def change(self) -> None:
        self.reader = Reader()


def test_a_module_that_is_called_by_itself_has_its_containers_parameters(ranks: RankPool) -> None:
    for first, second in ranks(2, called_by_itself):
        assert math.isfinite(first) and second == WIDTH


def test_a_pattern_that_matches_a_container_means_what_runs_in_it() -> None:
    units = plan_units(Dicts(), ["blocks.[01]", "blocks.0.up", "last"])
    assert [unit.name for unit in units[1:]] == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "last"]


def test_a_pattern_that_matches_only_parameters_is_an_error() -> None:
    text = (
        'zero_optimization.units: expected modules that are called, found "blocks.0", a ParameterDict without a '
        "forward, and without modules that have one; name the module around it, whose forward reads its parameters"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_units(OnlyParameters(), ["blocks.0"])
