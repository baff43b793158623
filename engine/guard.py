"""Notices what a user changes on the model behind the engine's back, before it goes wrong silently."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..zero.sequence import Unit


class ModelGuard:
    """Compares the model's parameters with those that the engine knows."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], copies_are_shared: bool) -> None:
        self._module = module
        self._known = {
            id(param): (name, group.requires_grad)
            for unit in units
            for group in unit.groups
            for name, param in zip(group.names, group.params, strict=True)
        }
        self._watched = [
            (name, param)
            for unit in units
            for group in unit.groups
            for name, param in zip(group.names, group.params, strict=True)
            if copies_are_shared or group.frees_memory or group.dtype.itemsize < 4
        ]
        self._versions: list[int] = []
        self.remember()

    def remember(self) -> None:
        """Takes the parameters as they are now for right."""
        self._versions = [param._version for _, param in self._watched]

    def check(self) -> None:
        """Raises ValueError for parameters that were added, frozen, unfrozen or changed in place."""
        count = 0
        for name, param in self._module.named_parameters():
            known = self._known.get(id(param))
            if known is None:
                raise ValueError(
                    f"parameter '{name}' was added or replaced after lowtide.initialize, which does not know it; "
                    "change the model first, then call initialize again"
                )
            if param.requires_grad != known[1]:
                raise ValueError(
                    f"parameter '{name}': expected requires_grad={known[1]} as at lowtide.initialize, found "
                    f"{param.requires_grad}; freeze and unfreeze before initialize, or call it again"
                )
            count += 1
        for (name, param), version in zip(self._watched, self._versions, strict=True):
            if param._version != version:
                raise ValueError(
                    f"parameter '{name}' was changed in place, which its master weights and other ranks do not see; "
                    "change it inside `with engine.gathered(parameter, modify=True):`"
                )
        assert count <= len(self._known)
