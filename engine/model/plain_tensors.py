"""Tensors of a model that are neither parameters nor buffers of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_REGISTERED = ("_parameters", "_buffers", "_modules")
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial)
_DEPTH = 2  # objects in objects: a distribution has its base. Deeper there are trainers, and all that they know.
Found = Iterator[tuple[str, Tensor, Callable[[Tensor], None]]]


def plain_tensors(model: nn.Module) -> Found:
    """(name, tensor, what puts another one there) of each place in an attribute, or in lists, tuples and dicts of it.

    So are those of modules in a list, which a model hides from its `state_dict`: a frozen teacher, say; and those of
    other objects: the noise schedule of a diffusion, a distribution.
    """
    known = set(map(id, model.modules()))
    for owner, module in model.named_modules():
        yield from _attributes(f"{owner}." if owner else "", module, known)


def _attributes(prefix: str, module: nn.Module, known: set[int]) -> Found:
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if name not in _REGISTERED:
            yield from _within(prefix + name, value, partial(attributes.__setitem__, name), known)


def _within(name: str, value: Any, put: Callable[[Any], None], known: set[int], depth: int = 0) -> Found:
    """known: identities of what was looked through already. depth: in how many objects that are no modules."""
    if isinstance(value, Tensor):
        yield name, value, put
        return
    is_object = not isinstance(value, dict | list | deque | tuple | nn.Module)
    if id(value) in known or (is_object and (depth == _DEPTH or not hasattr(value, "__dict__"))):
        return
    if is_object and isinstance(value, _OPAQUE):
        return
    known.add(id(value))
    if isinstance(value, nn.Module):
        for registered in (value._parameters, value._buffers, value._modules):
            yield from _items(name, registered.items(), registered.__setitem__, known)
        yield from _attributes(f"{name}.", value, known)
    elif is_object:
        for attribute, one in list(vars(value).items()):
            put_there = partial(vars(value).__setitem__, attribute)
            yield from _within(f"{name}.{attribute}", one, put_there, known, depth + 1)
    elif isinstance(value, dict):
        yield from _items(name, value.items(), value.__setitem__, known, depth)
    elif isinstance(value, list | deque):
        yield from _items(name, enumerate(value), value.__setitem__, known, depth)
    else:
        items = list(value)

        def put_in(index: int, one: Any) -> None:
            items[index] = one
            put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))

        yield from _items(name, enumerate(value), put_in, known, depth)


def _items(name: str, items: Any, put: Callable[[Any, Any], None], known: set[int], depth: int = 0) -> Found:
    for key, value in list(items):
        yield from _within(f"{name}[{key!r}]", value, partial(put, key), known, depth)
