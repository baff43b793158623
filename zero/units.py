"""Which modules form a unit: what is gathered, reduced and released together.

[Note: what runs]
A unit is gathered when its module is called, so it has to be one that is. A ModuleList, a ModuleDict and a class
without a forward of its own never are: the modules in them are, by the forward around. So where a container stands for
a block, what runs in it are the units; the container's own parameters belong to the forward around, the rest:

    layers = ModuleList of ModuleDict      layers.0         never called
                                           layers.0.attn    unit
                                           layers.0.mlp     unit
                                           layers.0.norm    rest: it is small beside these, and a gather is not
                                           layers.0.scale   rest: a parameter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

REST = "(rest)"
_MIN_SHARE_OF_PARAMETERS = 0.05


@dataclass(frozen=True)
class UnitPlan:
    """One unit: a module, and the parameters that it alone uses. The rest of the model is the unit of the root."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]

    @property
    def is_rest(self) -> bool:
        return self.name == REST


def plan_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[UnitPlan]:
    """The units in the order of registration, the rest first.

    Without patterns a unit is an element of an outermost `ModuleList` or `Sequential` whose elements repeat one class
    and hold a good part of the model. patterns: shell-style patterns of module names; each match is a unit.
    For a container it is what runs in it: see [Note: what runs].
    A parameter that several units use belongs to the rest, under its first name.
    Raises ValueError for a pattern that matches no module, or none that runs, or where units contain each other.
    """
    blocks = _named_blocks(model, patterns) if patterns is not None else _find_blocks(model)
    users: Counter[int] = Counter()
    for _, block in blocks:
        users.update({id(param) for param in block.parameters()})
    outside = {id(param) for param in _parameters_outside(model, {id(block) for _, block in blocks})}
    own = {key for key, count in users.items() if count == 1 and key not in outside}
    named = list(model.named_parameters())  # each parameter once
    rest = UnitPlan(REST, model, tuple((name, param) for name, param in named if id(param) not in own))
    units = [rest]
    for name, block in blocks:
        members = {id(param) for param in block.parameters()} & own
        units.append(UnitPlan(name, block, tuple((n, p) for n, p in named if id(p) in members)))
    return [unit for unit in units if unit.params or unit.is_rest]


def has_forward(module: nn.Module) -> bool:
    """False for containers, which are never called."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def parameters_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those that a module's own forward reads: its own, and those of containers in it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from parameters_read_by(child)


def _find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    total = _numel(model)
    blocks: dict[int, tuple[str, nn.Module]] = {}

    def visit(name: str, module: nn.Module) -> None:
        is_list = _repeats_one_class(module) and _numel(module) >= _MIN_SHARE_OF_PARAMETERS * total
        for child_name, child in _named_children(name, module):
            if not is_list:
                visit(child_name, child)
            else:
                for found in _running(child_name, child):
                    blocks.setdefault(id(found[1]), found)

    visit("", model)
    return list(blocks.values())


def _running(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module, or the outermost ones in a container that run, but for small ones; all with parameters."""
    if has_forward(module):
        return [(name, module)] if any(True for _ in module.parameters()) else []
    parts = [part for child in _named_children(name, module) for part in _running(*child)]
    largest = max((_numel(part) for _, part in parts), default=0)
    return [part for part in parts if _numel(part[1]) >= _MIN_SHARE_OF_PARAMETERS * largest]


def _named_children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield f"{name}.{child_name}" if name else child_name, child


def _repeats_one_class(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    elements = [child for child in module._modules.values() if child is not None]  # a list may hold None
    classes = Counter(type(child) for child in elements if any(True for _ in child.parameters()))
    return bool(classes) and max(classes.values()) >= 2 and 2 * max(classes.values()) >= sum(classes.values())


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


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
        running = _running(name, module)
        if not running and _numel(module):
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
