"""Which modules form a unit: what is gathered, reduced and released together.

[Note: large ends]
The rest is gathered as long as the model runs, before its first block, and its gradient is reduced when the backward
has ended, with nothing beside it. A vocabulary of 128,000 makes it larger than a block. So an embedding and a head are
units of their own where they are large, and where the order of registration, in which units are gathered, is that of
their use: an embedding is used before the blocks, a linear layer outside of them behind. What is tied is used twice,
and stays with the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..model.blocks import MIN_SHARE_OF_PARAMETERS, find_blocks, numel, running_modules
from .domain import Copies

REST = "(rest)"

_MIN_END_NUMEL = 1 << 20  # a message of less than some MiB costs its latency


@dataclass(frozen=True)
class UnitPlan:
    """One unit: a module, and the parameters that it alone uses. The rest of the model is the unit of the root."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    copies: tuple[Copies, ...] = ()
    is_end: bool = False  # a large embedding or head, and no block

    @property
    def is_rest(self) -> bool:
        return self.name == REST


def plan_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[UnitPlan]:
    """The units in the order of registration, the rest first.

    Without patterns a unit is an element of an outermost `ModuleList` or `Sequential` whose elements repeat one class
    and hold a good part of the model, and each large embedding before these and linear layer behind them.
    patterns: shell-style patterns of module names; each match is a unit.
    For a container it is what runs in it: see [Note: what runs] in `blocks.py`.
    A parameter that several units use belongs to the rest, under its first name.
    Raises ValueError for a pattern that matches no module, or none that runs, or where units contain each other.
    """
    blocks = _named_blocks(model, patterns) if patterns is not None else find_blocks(model)
    ends = set[int]()
    if patterns is None:
        blocks, ends = _with_large_ends(model, blocks)
    read = [{id(param) for param in block.parameters()} for _, block in blocks]
    users = Counter(key for keys in read for key in keys)
    outside = {id(param) for param in _parameters_outside(model, {id(block) for _, block in blocks})}
    own = {key for key, count in users.items() if count == 1 and key not in outside}
    named = list(model.named_parameters())  # each parameter once
    rest = UnitPlan(REST, model, tuple((name, param) for name, param in named if id(param) not in own))
    units = [rest]
    for (name, block), keys in zip(blocks, read, strict=True):
        members = keys & own
        params = tuple((n, p) for n, p in named if id(p) in members)
        units.append(UnitPlan(name, block, params, is_end=id(block) in ends))
    return [unit for unit in units if unit.params or unit.is_rest]


_Named = list[tuple[str, nn.Module]]


def _with_large_ends(model: nn.Module, blocks: _Named) -> tuple[_Named, set[int]]:
    """The blocks and what is large at both ends of a model, and the identities of that: [Note: large ends]."""
    if not blocks:
        return blocks, set()
    least = max(_MIN_END_NUMEL, MIN_SHARE_OF_PARAMETERS * max(numel(block) for _, block in blocks))
    places = {id(module): place for place, module in enumerate(model.modules())}
    first, last = (places[id(block)] for _, block in (blocks[0], blocks[-1]))
    inside = {id(part) for _, block in blocks for part in block.modules()}
    ends = [
        (name, module)
        for name, module in model.named_modules()
        if id(module) not in inside
        and not list(module.children())
        and (
            (isinstance(module, nn.Embedding) and places[id(module)] < first)
            or (isinstance(module, nn.Linear) and places[id(module)] > last)
        )
        and numel(module) >= least
    ]
    return sorted([*blocks, *ends], key=lambda named: places[id(named[1])]), {id(module) for _, module in ends}


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = [(name, module) for name, module in model.named_modules() if name]
    matches = [(n, m) for n, m in modules if any(fnmatchcase(n, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            known = ", ".join(sorted({name.split(".")[0] for name, _ in modules}))
            raise ValueError(
                f'zero_optimization.units: expected a pattern of module names, found "{pattern}", which matches no '
                f"module; the model's top modules are: {known or 'none'}"
            )
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in matches:
        running = running_modules(name, module)
        if not running and numel(module):
            raise ValueError(
                f'zero_optimization.units: expected modules that are called, found "{name}", a {type(module).__name__} '
                "without a forward, and without modules that have one; name the module around it, whose forward reads "
                "its parameters"
            )
        blocks.update({id(part): (part_name, part) for part_name, part in running})
    for name, block in blocks.values():
        inner = {id(module) for module in block.modules()} - {id(block)}
        nested = [blocks[key][0] for key in blocks if key in inner]
        if nested:
            raise ValueError(
                f'zero_optimization.units: expected modules that do not contain each other, found "{name}" which '
                f'contains "{nested[0]}"; name one of them'
            )
    return list(blocks.values())


def _parameters_outside(model: nn.Module, blocks: set[int]) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) in blocks:
            continue
        found.extend(module.parameters(recurse=False))
        stack.extend(module.children())
    return found
