"""The repeated blocks of a model: what units are made of, and between which pipelines split.

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
from collections.abc import Iterator

import torch
from torch import nn

MIN_SHARE_OF_PARAMETERS = 0.05


class Layers(nn.Sequential):
    """Of which each element with parameters is a block, whatever their classes are."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The elements of the outermost `ModuleList`s and `Sequential`s that repeat one class, in order of registration.

    Of a container it is what runs in it. Elements without parameters are none, nor are those of a list that holds less
    than a twentieth of the model's parameters.
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
                    blocks.setdefault(id(found[1]), found)

    visit("", model)
    return list(blocks.values())


def running_modules(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module, or the outermost ones in a container that run, but for small ones; all with parameters."""
    if has_forward(module):
        return [(name, module)] if any(True for _ in module.parameters()) else []
    parts = [part for child in _named_children(name, module) for part in running_modules(*child)]
    largest = max((numel(part) for _, part in parts), default=0)
    return [part for part in parts if numel(part[1]) >= MIN_SHARE_OF_PARAMETERS * largest]


def has_forward(module: nn.Module) -> bool:
    """False for containers, which are never called, and what torch.jit has compiled, on which no hook can be put."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def parameters_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those that a module's own forward reads: its own, and those of what has none in it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from parameters_read_by(child)


def numel(module: nn.Module) -> int:
    """Elements of its parameters."""
    return sum(param.numel() for param in module.parameters())


def _named_children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield f"{name}.{child_name}" if name else child_name, child


def _has_blocks(module: nn.Module) -> bool:
    """A list or sequence of which half the elements with parameters, two at least, have one class; or `Layers`."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    if isinstance(module, Layers):
        return True
    elements = [child for child in module._modules.values() if child is not None]  # a list may hold None
    classes = Counter(type(child) for child in elements if any(True for _ in child.parameters()))
    return bool(classes) and max(classes.values()) >= 2 and 2 * max(classes.values()) >= sum(classes.values())
