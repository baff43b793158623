"""Buffers of a module as they were, for a forward of it that is made once more."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class BufferValues:
    """A context in which a module computes with copies of the buffers that it had when this was made.

    What it changes in them is gone at the end, when it has its own ones back. It may be entered several times.
    Copies, since no `_version` tells of BatchNorm's statistics, and of codebooks that are changed through `.data`.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [part._buffers for part in module.modules() if part._buffers and isinstance(part._buffers, dict)]
        self._before = [(owner, dict(owner)) for owner in owners]
        buffers = {id(one): one for _, held in self._before for one in held.values() if one is not None}
        self._values = {key: _copy(one) for key, one in buffers.items()}
        self._own: list[dict[str, Tensor | None]] = []

    @property
    def are_there(self) -> bool:
        """Whether the module has any."""
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
