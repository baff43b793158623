"""Blocks that are never called, but the modules in them: every stage trains them alike, and units are what runs."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.zero.plan import REST, plan_units
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train_all, train_plainly
from tests.zero.containers import (
    WIDTH,
    Backwards,
    Dicts,
    Lists,
    ListsOfBlocks,
    Mixed,
    OneForAll,
    OnlyParameters,
    OwnClass,
    TwoLists,
)

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
    """On one transport or the other, in turn."""
    cases = [Case(kind, models.vector_batch_float64, clip=0.05, steps=2) for kind in UNITS]
    transports = [
        {"communication": {"transport": ("sockets", "shared_memory")[number % 2]}} for number in range(len(cases))
    ]
    grid = [case.at(3, config=transport) for case, transport in zip(cases, transports, strict=True)]
    for case, outcome in zip(cases, ranks(2, train_all, grid)[0], strict=True):
        assert_close(outcome, train_plainly(case, 2), 1e-10, 1e-10, case.build.__name__)


def called_by_itself() -> list[float]:
    """Sums of what parts of the models give outside of the models' own forward."""
    sums = []
    for kind in (Dicts, Readers):
        engine = lowtide.initialize(kind(), {"optimizer": {"type": "sgd"}, "zero_optimization": {"stage": 3}})
        with torch.no_grad():
            x = torch.ones(1, WIDTH, dtype=torch.float64)
            part = engine.module.get_submodule("blocks.1.up" if kind is Dicts else "reader")
            sums.append(part(x).sum().item())
        engine.close()
    return sums


class Reader(nn.Module):
    """Its forward reads parameters of containers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH)])
        self.more: Any = nn.ModuleDict({"inner": nn.ParameterDict({"shift": torch.zeros(WIDTH)})})

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
        'zero_optimization.units: expected modules with a forward, found "blocks.0", a ParameterDict that has none, '
        "nor do its children; name the parent whose forward reads its parameters"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_units(OnlyParameters(), ["blocks.0"])
