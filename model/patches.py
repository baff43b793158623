"""A list of everything that is installed on the user's model: hooks, forwards, classes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_NOTHING = object()


class ModelPatches:
    """Installs hooks and overrides on the modules of a model, and removes them in reverse.

    A later patch may call an earlier patch, and is removed before it. If foreign code has since replaced a patch, its
    replacement stays, and continues to call our patch until it is removed.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._owner: Callable[[], object] | None = None
        self._close_owner: Callable[[], object] | None = None

    def __reduce__(self) -> Any:
        """Copy as an empty list: a copied module has no patches."""
        return ModelPatches, ()

    def belongs_to(self, owner: object, close: Callable[[], object]) -> None:
        """Register the owner. close: ends everything that the owner has, including these patches.

        Neither `close` nor the modules may keep the owner alive.
        """
        self._owner, self._close_owner = weakref.ref(owner), close

    def close_if_lost(self) -> bool:
        """Close an owner that was garbage-collected without `close`. Returns True if it closed an owner."""
        if self._owner is None or self._close_owner is None or self._owner() is not None:
            return False
        # Taken away first, so that an error of `close` does not come again with the next engine.
        close, self._close_owner = self._close_owner, None
        close()
        return True

    def hook(self, handle: RemovableHandle) -> None:
        """Record a hook that torch has registered."""
        self._undo.callback(handle.remove)

    def override(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module, such as `forward`, in place of its class's attribute or an earlier override."""
        before = module.__dict__.get(name, _NOTHING)
        # Not by setattr: nn.Module would register a module as a child.
        module.__dict__[name] = value
        self._undo.callback(_take_off, module, name, value, before)

    def exchange_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Change the class of a module."""
        before = type(module)
        module.__class__ = cls
        self._undo.callback(_give_class, module, cls, before)

    def callback(self, undo: Callable[[], object]) -> None:
        """Record another patch by the function that removes it."""
        self._undo.callback(undo)

    def close(self) -> None:
        """Remove all patches. If a removal fails, remove the remaining patches and then raise its error."""
        self._undo.close()


def _take_off(module: nn.Module, name: str, value: Any, before: Any) -> None:
    if module.__dict__.get(name) is not value:
        return
    if before is _NOTHING:
        del module.__dict__[name]
    else:
        module.__dict__[name] = before


def _give_class(module: nn.Module, cls: type[nn.Module], before: type[nn.Module]) -> None:
    if type(module) is cls:
        module.__class__ = before
