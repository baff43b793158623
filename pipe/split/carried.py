"""What goes from one pipeline stage to the next for one microbatch.

[Note: names of values]
A decoder's embedded tokens may be made before the encoder's blocks; a skip connection joins the outputs of two distant
blocks. Such a value must pass stages whose first block does not take it as an argument, so it needs a name. Every
stage runs the same code outside the blocks, with real or absent tensors, and so makes the same calls: a value is
named by the function that made it and by how many calls of that function came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .absent import Absent, is_missing
from .trees import TensorShape, leaves, map_leaves

Name = tuple[str, int, int]  # function or block, number of its call or of the block, place in the result
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


class OuterValues(TorchFunctionMode):
    """Keeps every tensor that a forward makes outside its blocks, by its name; but not while it is `paused`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Name, Tensor] = {}
        self.used: set[Name] = set()  # of the values that were missing at the cut, those that were needed behind it
        self._paused = False
        self._missing: dict[int, Name] | None = None
        self._calls: Counter[str] = Counter()
        self._with_grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        function = str(getattr(func, "__name__", func))
        # What hooks do to parameters without gradients is no part of the forward, and differs between ranks.
        if self._paused or function == "__get__" or torch.is_grad_enabled() != self._with_grad:
            return result
        self.keep(function, self._calls[function], result)
        self._calls[function] += 1
        if any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            self.use((args, kwargs))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside a block nothing is named."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def keep(self, function: str, number: int, result: Any) -> None:
        """Names the tensors in what a function or block returned."""
        for place, leaf in enumerate(leaves(result)):
            if isinstance(leaf, Tensor):
                self.values[function, number, place] = leaf

    def cut(self, arguments: Any) -> None:
        """The next stage begins here, with `arguments` at hand: from now on, uses of what else is missing count."""
        at_hand = {id(leaf) for leaf in leaves(arguments)}
        self._missing = {
            id(value): name
            for name, value in self.values.items()
            if isinstance(value, Absent) and is_missing(value) and id(value) not in at_hand
        }

    def use(self, value: Any) -> None:
        """Something needs the tensors in `value`."""
        if self._missing is not None:
            self.used.update(self._missing[id(leaf)] for leaf in leaves(value) if id(leaf) in self._missing)
