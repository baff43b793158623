"""The repeated blocks of a model, between which it can be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_MIN_SHARE_OF_PARAMETERS = 0.05


@dataclass(frozen=True)
class Block:
    """One repeated part of a model, by its name in the model."""

    name: str
    module: nn.Module


def find_blocks(model: nn.Module) -> tuple[Block, ...]:
    """The elements of the outermost `ModuleList`s and `Sequential`s that repeat one class, in order of registration.

    Elements without parameters are none, nor is a list that holds less than a twentieth of the model's parameters.
    Raises ValueError where there are none.
    """
    total = _numel(model)
    blocks: dict[int, Block] = {}
    lists: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            lists.append(_described(name, module, total))
            if _repeats_one_class(module) and _numel(module) >= _MIN_SHARE_OF_PARAMETERS * total:
                for child_name, child in module.named_children():
                    if _numel(child):
                        blocks.setdefault(id(child), Block(f"{name}.{child_name}" if name else child_name, child))
                return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    if not blocks:
        raise ValueError(
            f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
            "Sequential whose elements have parameters and repeat one class, with at least "
            f"{_MIN_SHARE_OF_PARAMETERS:.0%} of the model's {total} parameters, found "
            f"{'; '.join(lists) if lists else 'no ModuleList and no Sequential'}; keep the repeated parts of the model "
            "in one nn.ModuleList or nn.Sequential"
        )
    return tuple(blocks.values())


def check_order(blocks: Sequence[Block], called: Sequence[int]) -> None:
    """Raises ValueError unless a forward called every block once, in order."""
    if called != list(range(len(blocks))):
        shown = ", ".join(blocks[number].name for number in called)
        raise ValueError(
            f"pipeline: expected a forward that calls each of {len(blocks)} blocks once, in the order of registration, "
            f"found the calls: {shown or 'none'}"
        )


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _repeats_one_class(module: nn.Module) -> bool:
    classes = Counter(type(child) for child in module.children() if _numel(child))
    return bool(classes) and max(classes.values()) >= 2 and 2 * max(classes.values()) >= sum(classes.values())


def _described(name: str, module: nn.Module, total: int) -> str:
    classes = Counter(type(child).__name__ for child in module.children() if _numel(child))
    held = ", ".join(f"{count} x {kind}" for kind, count in classes.items()) or "nothing with parameters"
    share = _numel(module) / total if total else 0.0
    return f"'{name or '(the model)'}' ({type(module).__name__} of {held}, {share:.0%} of the parameters)"
