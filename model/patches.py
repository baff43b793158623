"""The one list of all that stands on a model that is not ours: hooks, forwards, classes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_NOTHING = object()


class ModelPatches:
    """Puts things on the modules of a model in order, and takes them off in reverse.

    What lies above an entry was put on later, so it may call the entry and is gone before it. Where somebody else has
    meanwhile put his own over an entry, his stays, and what it calls is ours until he takes it off.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._owner: Callable[[], object] | None = None
        self._close_owner: Callable[[], object] | None = None

    def __reduce__(self) -> Any:
        """Of a copy of a module on which it is noted: nothing stands on that."""
        return ModelPatches, ()

    def belongs_to(self, owner: object, close: Callable[[], object]) -> None:
        """close: what ends all that the owner has, this too. It must not hold the owner, and the modules must not."""
        self._owner, self._close_owner = weakref.ref(owner), close

    def close_if_lost(self) -> bool:
        """Closes an owner that nobody has any more, who could; whether there was one."""
        if self._owner is None or self._close_owner is None or self._owner() is not None:
            return False
        close, self._close_owner = self._close_owner, None
        close()
        return True

    def hook(self, handle: RemovableHandle) -> None:
        """Enters a hook that torch has registered."""
        self._undo.callback(handle.remove)

    def override(self, module: nn.Module, name: str, value: Any) -> None:
        """Gives one module an attribute of its own, such as `forward`, in place of its class's or of an earlier one."""
        before = module.__dict__.get(name, _NOTHING)
        module.__dict__[name] = value
        self._undo.callback(_take_off, module, name, value, before)

    def exchange_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Gives one module another class."""
        before = type(module)
        module.__class__ = cls
        self._undo.callback(_give_class, module, cls, before)

    def callback(self, undo: Callable[[], object]) -> None:
        """Enters anything else, by what takes it off."""
        self._undo.callback(undo)

    def close(self) -> None:
        """Takes all off; goes on to the end where one entry cannot be, and raises its error then."""
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
