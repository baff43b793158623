"""What goes from one pipeline stage to the next for one microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .outer_values import Name
from .trees import TensorShape, map_leaves

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class CarriedSpec:
    """Small, picklable and comparable: where the tensors belong on the next stage.

    block: the block before which the forward was left.
    tensors: shape and dtype of each tensor.  needs_grad: whether its gradient is to be sent back.
    slots: (position among the arguments of `block`, index of the tensor).  num_arguments: of which `block` has so many.
    passing: (name, index of the tensor) of what `block` does not take, and later code needs. [Note: names of values]
    outputs: what each block before `block` returned, with a `TensorShape` for a tensor: (output, number of blocks).
    """

    block: str
    tensors: tuple[TensorShape, ...]
    needs_grad: tuple[bool, ...]
    slots: tuple[tuple[int, int], ...]
    num_arguments: int
    passing: tuple[tuple[Name, int], ...]
    outputs: tuple[tuple[Any, int], ...]


@dataclass(frozen=True)
class Carried:
    """The tensors that leave a stage for one microbatch, each once, and what the next stage must know about them."""

    tensors: tuple[Tensor, ...]
    spec: CarriedSpec

    def detached(self) -> Carried:
        """The same values as leaves that collect a gradient: what the next stage receives, without a copy."""
        pairs = zip(self.tensors, self.spec.needs_grad, strict=True)
        return Carried(tuple(tensor.detach().requires_grad_(needs) for tensor, needs in pairs), self.spec)


def description(output: Any, block: str) -> Any:
    """A block's output with a `TensorShape` in place of each tensor. Raises ValueError for what cannot be carried."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorShape.of(leaf)
        if isinstance(leaf, _PLAIN):
            return leaf
        raise ValueError(
            f"pipeline: expected '{block}' to return tensors, numbers, strings and None, nested in tuples, lists and "
            f"dictionaries, found {type(leaf).__name__}, which cannot be carried to the next stage"
            + ("; set use_cache to False" if "cache" in type(leaf).__name__.lower() else "")
        )

    return map_leaves(describe, output)


def run_lengths(values: Iterable[Any]) -> tuple[tuple[Any, int], ...]:
    """(value, how often it comes in a row)."""
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return tuple(runs)
