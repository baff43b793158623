"""Forwards that run again, or beside the training: their inputs, and the state that they must not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .float8 import without_float8


@dataclass(frozen=True)
class Recomputing:
    """A replacement of a module's forward. If the module is compiled, `forward` is compiled.

    around: called with `forward` and its arguments.
    """

    around: Callable[..., Any]
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.forward, *args, **kwargs)


class _SameTensors(TorchFunctionMode):
    """Lets deep copies share the tensors of the original."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tensors of a cache may have a graph, and torch refuses deep copies of these.
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def copy_states(values: Any) -> Any:
    """Copy objects that a forward may change, such as a key-value cache. Tensors are shared."""

    def copied(value: Any) -> Any:
        return value if value is None or isinstance(value, Tensor) else copy.deepcopy(value)

    with _SameTensors():
        return tree_map(copied, values)


class BufferValues:
    """A context that lets a module compute with copies of the buffers that it had when this was made.

    Afterwards the module has its buffers back, and changes of the copies are lost. May be entered several times.
    """

    def __init__(self, module: nn.Module) -> None:
        # Copies, since `_version` does not show changes of BatchNorm's statistics and changes through `.data`.
        # A TorchScript module has a wrapper in place of the dict. It cannot be cleared.
        owners = [part._buffers for part in module.modules() if part._buffers and isinstance(part._buffers, dict)]
        self._before = [(owner, dict(owner)) for owner in owners]
        buffers = {id(one): one for _, held in self._before for one in held.values() if one is not None}
        self._values = {key: _copy(one) for key, one in buffers.items()}
        self._own: list[dict[str, Tensor | None]] = []

    @property
    def are_there(self) -> bool:
        """True if the module has buffers."""
        return bool(self._values)

    def __enter__(self) -> None:
        self._own = [dict(owner) for owner, _ in self._before]
        copies = {key: _copy(one) for key, one in self._values.items()}
        for owner, before in self._before:
            owner.clear()
            owner.update({name: None if one is None else copies[id(one)] for name, one in before.items()})

    def __exit__(self, *error: Any) -> None:
        for (owner, _), own in zip(self._before, self._own, strict=True):
            owner.clear()
            owner.update(own)
        self._own = []


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Wrap code that tries the module: without gradients and float8, in eval mode. Restores modes and buffers."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with BufferValues(module), without_float8(module), torch.no_grad():
            yield
    finally:
        for part, was_training in modes:
            # Not by `train()`: it would set the modules within too, and a user may override it.
            part.training = was_training
