"""Forwards inside of `torch.func`'s transforms (vmap, grad): the only place that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_functorch = torch._C._functorch
T = TypeVar("T")


def untransformed(action: Callable[[], T]) -> T:
    """Calls it with plain torch's operations: a view that `grad` has made cannot become a parameter's memory."""
    if _functorch.peek_interpreter_stack() is None:
        return action()
    with temporarily_clear_interpreter_stack():
        return action()


def at_all_levels(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Each tensor, and what transforms have wrapped in it: a backward may come to any of these."""
    return tensors if _functorch.peek_interpreter_stack() is None else _with_wrapped(tensors)


def _with_wrapped(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
            yield tensor
