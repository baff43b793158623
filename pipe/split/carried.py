"""The tensors that a pipeline stage sends to the next stage for a microbatch (`Carried`), and their description.

[Note: names of values]
A decoder's embedded tokens may be made before the encoder's blocks. A skip connection joins the outputs of two distant
blocks. Such a value must pass through stages whose first block does not take it as an argument, so it needs a name.
Every stage runs the same code outside the blocks, with real or absent tensors, and so makes the same calls. A value is
named by the function that made it and by the number of earlier calls of that function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .absent import Absent, is_missing
from .trees import TensorShape, leaves, map_leaves

Name = tuple[str, int, int]  # function or block, number of the call or of the block, position in the result
# Attributes that make a tensor, as a function does. Not `data` and `grad`: hooks of a single rank may read them.
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class CarriedSpec:
    """Says where the carried tensors belong on the next stage. Small, picklable and comparable.

    block: the forward was left at the entry of this block. num_arguments: of `block`.
    tensors: shape and dtype of each tensor. needs_grad: True if its gradient is sent back.
    slots: (position among the arguments of `block`, index of the tensor).
    passing: (name, index of the tensor) of values that later code needs and `block` does not take.
    outputs: (output, number of blocks) of the blocks before `block`, in order; a tensor is a `TensorShape`.
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
    """The tensors that leave a stage for a microbatch, each once, and their spec."""

    tensors: tuple[Tensor, ...]
    spec: CarriedSpec

    def detached(self) -> Carried:
        """Return the same values as leaves that collect a gradient, without a copy, as the next stage receives them."""
        pairs = zip(self.tensors, self.spec.needs_grad, strict=True)
        return Carried(tuple(tensor.detach().requires_grad_(needs) for tensor, needs in pairs), self.spec)


def description(output: Any, block: str) -> Any:
    """Replace each tensor of a block's output by its `TensorShape`. Raises ValueError for a type that is not sent."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorShape.of(leaf)
        if isinstance(leaf, _PLAIN):
            return leaf
        raise ValueError(
            f"pipeline: expected '{block}' to return tensors, numbers, strings and None, nested in tuples, lists and "
            f"dictionaries, found {type(leaf).__name__}, a type that cannot be sent to the next stage"
            + ("; set use_cache to False" if "cache" in type(leaf).__name__.lower() else "")
        )

    return map_leaves(describe, output)


def _replace_modes(top: Sequence[TorchFunctionMode], new: Sequence[TorchFunctionMode]) -> None:
    """Replace the modes at the top of torch's stack."""
    # torch has no public way to take a mode out from below other modes.
    for _ in top:
        torch._C._pop_torch_function_stack()
    for mode in new:
        torch._C._push_on_torch_function_stack(mode)


class OuterValues(TorchFunctionMode):
    """Keeps every tensor that a forward makes outside its blocks, by name. See [Note: names of values]."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Name, Tensor] = {}
        self.used: set[Name] = set()  # values that were missing at the cut and needed after it
        self._missing: dict[int, Name] | None = None
        self._calls: Counter[str] = Counter()
        self._with_grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        function = str(getattr(func, "__name__", func))
        if function == "__get__" and func.__self__.__name__ in _VIEWS:
            function = func.__self__.__name__
        # Operations in another grad mode are hooks on parameters: no part of the forward, and different between ranks.
        if function == "__get__" or torch.is_grad_enabled() != self._with_grad:
            return result
        self.keep(function, self._calls[function], result)
        # Also for results without tensors: all stages must count the same calls.
        self._calls[function] += 1
        # A function without a tensor in its result (a size, a dtype) uses no values.
        if any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            self.use((args, kwargs))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the mode off torch's stack within the context, as inside a block: torch's compiler would trace it."""
        modes = [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
        above = modes[modes.index(self) :] if self in modes else []  # with this mode first
        _replace_modes(above, above[1:])
        try:
            yield
        finally:
            _replace_modes(above[1:], above)

    def keep(self, function: str, number: int, result: Any) -> None:
        """Name the tensors that a function or block returned."""
        for place, leaf in enumerate(leaves(result)):
            if isinstance(leaf, Tensor):
                self.values[function, number, place] = leaf

    def cut(self, arguments: Any) -> None:
        """Begin to count uses of missing values, except `arguments`, which the next stage receives here."""
        received = {id(leaf) for leaf in leaves(arguments)}
        self._missing = {
            id(value): name
            for name, value in self.values.items()
            if isinstance(value, Absent) and is_missing(value) and id(value) not in received
        }

    def use(self, value: Any) -> None:
        """Count the missing tensors in `value` as used."""
        if self._missing is not None:
            self.used.update(self._missing[id(leaf)] for leaf in leaves(value) if id(leaf) in self._missing)
