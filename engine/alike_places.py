"""Plans of places for who asks for bytes alone, and asks often: places that are alike have one plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import nn

from ..comm import Arrangement
from ..zero.domain import Domain
from ..zero.plan import ModelPlan
from ..zero.units import UnitPlan

_Units = tuple[UnitPlan, ...]


class AlikePlaces:
    """Plans of one model's places, for configs that differ in degrees, in what is divided, and in where that rests.

    Two places are alike where their units have parameters of the same shapes, dtypes, roles and shares, in the same
    order. The plan of all of them is that of the first, names included.
    """

    def __init__(self) -> None:
        self._stages: dict[Hashable, list[_Units]] = {}
        self._plans: dict[Hashable, tuple[ModelPlan, ...]] = {}

    def of(
        self,
        splits: Hashable,
        domain: Domain,
        arrangement: Arrangement,
        units_by_place: Callable[[], Sequence[_Units]],
        kind_of: Callable[[nn.Parameter], Hashable],
        plan_of: Callable[[_Units], ModelPlan],
    ) -> tuple[ModelPlan, ...]:
        """By place of the pipeline. splits: all that units of places and kinds of parameters depend on."""
        if (splits, domain, arrangement) not in self._plans:
            if splits not in self._stages:
                self._stages[splits] = _first_ones(units_by_place(), kind_of)
            plans = {id(units): units for units in self._stages[splits]}
            made = {key: plan_of(units) for key, units in plans.items()}
            self._plans[splits, domain, arrangement] = tuple(made[id(units)] for units in self._stages[splits])
        return self._plans[splits, domain, arrangement]


def _first_ones(places: Sequence[_Units], kind_of: Callable[[nn.Parameter], Hashable]) -> list[_Units]:
    """For each place the units of the first that is like it."""
    kinds: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}  # of kinds: to hash them once

    def kind(param: nn.Parameter) -> Hashable:
        if id(param) not in kinds:
            kinds[id(param)] = numbers.setdefault(kind_of(param), len(numbers))
        return kinds[id(param)]

    known: dict[Hashable, _Units] = {}
    return [
        known.setdefault(tuple((one.copies, tuple(kind(param) for _, param in one.params)) for one in units), units)
        for units in places
    ]
