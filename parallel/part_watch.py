"""Who uses what blocks give to each other: looked at in a forward, where it is a part of the tokens.

That a block is given what the one before it gave does not say that nobody else is: a loss of each block's output, or
what a model returns of them, would be of a part, without an error. So functions of torch are watched in the first
forward of each mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class PartWatch(TorchFunctionMode):
    """To be entered around a forward of the model."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        """is_inside: whether a block runs now, which may do with its tokens what it likes."""
        self._is_inside = is_inside
        self._given: dict[int, tuple[Tensor, str]] = {}  # by storage; kept, so that another one is not there

    def note(self, part: Tensor, name: str) -> None:
        """What the block of that name has given."""
        self._given[part.untyped_storage()._cdata] = part, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_inside() or not self._given:
            return func(*args, **kwargs)
        used = [(one, name) for one in tree_leaves((args, kwargs)) if (name := self._giver(one)) is not None]
        versions = [_version(one) for one, _ in used]
        result = func(*args, **kwargs)
        if used:
            is_new = any(isinstance(x, Tensor) and all(x is not one for one, _ in used) for x in tree_leaves(result))
            if is_new or versions != [_version(one) for one, _ in used]:
                raise _error(used[0][1], getattr(func, "__name__", str(func)))
        return result

    def check(self, output: Any) -> None:
        """output: of the model. Raises ValueError."""
        for one in tree_leaves(output):
            if (name := self._giver(one)) is not None:
                raise _error(name, "it in what the model gives")

    def _giver(self, x: Any) -> str | None:
        if type(x) is not Tensor or x.is_meta or x.layout != torch.strided:
            return None
        found = self._given.get(x.untyped_storage()._cdata)
        return None if found is None else found[1]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _error(name: str, found: str) -> ValueError:
    return ValueError(
        f"parallel.tensor_sequence: expected that the next block alone uses what '{name}' gives, found {found}: "
        "between blocks a rank has a part of the tokens; set it to false"
    )
