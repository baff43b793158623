"""The repeated blocks of a model, between which it can be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ...model import blocks as model_blocks
from ...model.blocks import MIN_SHARE_OF_PARAMETERS, numel


@dataclass(frozen=True)
class Block:
    """One repeated part of a model, by its name in the model."""

    name: str
    module: nn.Module


def find_blocks(model: nn.Module) -> tuple[Block, ...]:
    """The model's blocks, as ZeRO finds them, in order of registration. Raises ValueError where there are none."""
    blocks = tuple(Block(name, module) for name, module in model_blocks.find_blocks(model))
    if not blocks:
        total = numel(model)
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        described = "; ".join(_described(name, module, total) for name, module in lists)
        raise ValueError(
            f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
            "Sequential whose elements have parameters and repeat one class, with at least "
            f"{MIN_SHARE_OF_PARAMETERS:.0%} of the model's {total} parameters, found "
            f"{described or 'no ModuleList and no Sequential'}; keep the repeated parts of the model "
            "in one nn.ModuleList or nn.Sequential"
        )
    return blocks


def check_order(blocks: Sequence[Block], called: Sequence[int]) -> None:
    """Raises ValueError unless a forward called every block once, in order."""
    if called != list(range(len(blocks))):
        shown = ", ".join(blocks[number].name for number in called)
        raise ValueError(
            f"pipeline: expected a forward that calls each of {len(blocks)} blocks once, in the order of registration, "
            f"found the calls: {shown or 'none'}"
        )


def _described(name: str, module: nn.Module, total: int) -> str:
    classes = Counter(type(child).__name__ for child in module.children() if numel(child))
    held = ", ".join(f"{count} x {kind}" for kind, count in classes.items()) or "nothing with parameters"
    share = numel(module) / total if total else 0.0
    return f"'{name or '(the model)'}' ({type(module).__name__} of {held}, {share:.0%} of the parameters)"
