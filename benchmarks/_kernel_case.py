"""What a kernel is measured with: inputs, forms that compute it, its formula, and the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Size = tuple[int, ...]
Form = Callable[[Tensors], Tensors]
"""Gives results by name from inputs by name, which it may overwrite. Tensors without gradient are results too."""

Pass = Literal["forward", "backward", "both"]
"""both: forward and backward in one, for peers that compute gradients in forward."""

FLOAT32_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Draw:
    """Random tensors on the device that is measured."""

    device: str
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).mul_(size).to(dtype)

    def labels(self, num_rows: int, num_classes: int) -> Tensor:
        """(num_rows,) int64; one in eight is ignored (-100), but never the first."""
        labels = torch.randint(num_classes, (num_rows,), generator=self.generator, device=self.device)
        labels[1:][torch.rand(num_rows - 1, generator=self.generator, device=self.device) < 0.125] = -100
        return labels


def _as_they_are(results: Tensors) -> Tensors:
    return results


def _nothing(inputs: Tensors) -> Tensors:
    return {}


@dataclass(frozen=True)
class Case:
    """One kernel, or one use of it, for several sizes.

    A forward pass is timed with gradients enabled where the case has a backward pass of its own, else without.
    """

    name: str
    file: str  # of kernels/
    draw: Callable[[Size, torch.dtype, Draw], Tensors]
    forms: Mapping[str, Form]  # by contender: "lowtide", "torch", "liger", and "compile": what torch.compile gets
    exact: Form  # from inputs in float64
    moved: Callable[[Tensors, Tensors], Mapping[Pass, int]]  # from inputs and results: bytes, each read or written once
    sizes: tuple[Size, ...]  # ascending
    tiny: Size  # for Triton's interpreter: does not divide, few programs
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    passes: tuple[Pass, ...] = ("forward",)
    inputs_with_gradient: tuple[str, ...] = ()
    results_with_gradient: tuple[str, ...] = ()  # float results that a gradient comes from; others have none
    read: Callable[[Tensors], Tensors] = field(default=_as_they_are)  # results -> what the formula gives
    allowed: Callable[[Tensors], Tensors] = field(default=_nothing)  # inputs in float64 -> what results may be off by
    summed_dims: Mapping[str, int] = field(default_factory=dict)  # product -> index of a size: so long are its sums
    inner_roundings: float = 0.0  # of intermediate values to the dtype: they act on an element whatever its own size
    is_memory_bound: bool = True


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def size_text(size: Size) -> str:
    return " x ".join(map(str, size))


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest_of_blocks(values: Tensor, block_numel: int) -> Tensor:
    """Of each element's block the largest magnitude: (n,) -> (n,)."""
    numel = values.numel()
    blocks = torch.nn.functional.pad(values.abs(), (0, -numel % block_numel)).view(-1, block_numel)
    return blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:numel]
