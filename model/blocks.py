"""Find the repeated blocks of a model. Units consist of blocks, and pipelines split between them.

[Note: what runs]
A unit is gathered when its module is called, so it must be a module that is called. A ModuleList, a ModuleDict and a
class without a forward are never called: the surrounding forward calls the modules in them. So if a container is
in the place of a block, the modules in it that run are the units. Its direct parameters belong to the surrounding
forward, in the root unit:

    layers = ModuleList of ModuleDict      layers.0         never called
                                           layers.0.attn    unit
                                           layers.0.mlp     unit
                                           layers.0.norm    root unit: too small to be worth a gather
                                           layers.0.scale   root unit: a parameter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

MIN_SHARE_OF_PARAMETERS = 0.05


class Layers(nn.Sequential):
    """A sequence: its elements with parameters are blocks, whatever their classes are."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the elements of the outermost `ModuleList`s and `Sequential`s that repeat a class, in order of registration.

    If an element is a container, the modules in it that run are returned. Elements without parameters are skipped, and
    so are lists with less than a twentieth of the model's parameters.
    """
    total = numel(model)
    blocks: dict[int, tuple[str, nn.Module]] = {}

    def visit(name: str, module: nn.Module) -> None:
        is_list = _has_blocks(module) and numel(module) >= MIN_SHARE_OF_PARAMETERS * total
        for child_name, child in _named_children(name, module):
            if not is_list:
                visit(child_name, child)
            else:
                for found in running_modules(child_name, child):
                    # A model that shares layers lists a module several times. Its first name counts.
                    blocks.setdefault(id(found[1]), found)

    visit("", model)
    return list(blocks.values())


def running_modules(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the module, or for a container the outermost modules in it that run.

    Modules without parameters and small modules are skipped.
    """
    if has_forward(module):
        return [(name, module)] if any(True for _ in module.parameters()) else []
    parts = [part for child in _named_children(name, module) for part in running_modules(*child)]
    largest = max((numel(part) for _, part in parts), default=0)
    return [part for part in parts if numel(part[1]) >= MIN_SHARE_OF_PARAMETERS * largest]


def has_forward(module: nn.Module) -> bool:
    """Return False for containers, since they are never called, and torch.jit modules, since they take no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    # A forward that somebody has set on the module is no method of its class, and counts.
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def parameters_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module's forward reads: its direct parameters, and those of containers in it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from parameters_read_by(child)


def numel(module: nn.Module) -> int:
    """Count the elements of a module's parameters."""
    return sum(param.numel() for param in module.parameters())


def _named_children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield f"{name}.{child_name}" if name else child_name, child


def _has_blocks(module: nn.Module) -> bool:
    """Return True for `Layers`, and for a list if at least two and half of its elements share a class."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    if isinstance(module, Layers):
        return True
    elements = [child for child in module._modules.values() if child is not None]  # a list may hold None
    classes = Counter(type(child) for child in elements if any(True for _ in child.parameters()))
    return bool(classes) and max(classes.values()) >= 2 and 2 * max(classes.values()) >= sum(classes.values())
