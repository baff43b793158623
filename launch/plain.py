"""Frozen dataclasses as plain JSON values and back, by their type hints."""

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses and mappings become objects, tuples and lists become lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """The `kind` that `to_plain` made `value` of; a dataclass, tuple, mapping, union or plain type.

    Fields that `kind` does not have are left out, so that a newer lowtide can be understood as far as it is the same.
    Raises ValueError where `value` is something else.
    """
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"expected an object for {getattr(kind, '__name__', kind)}, found {value!r}")
        hints = _hints(kind)  # type: ignore[arg-type]  # a dataclass, not an instance of one
        known = {name: from_plain(hints[name], item) for name, item in value.items() if name in hints}
        try:
            return kind(**known)  # type: ignore[operator]  # a dataclass, not an instance of one
        except TypeError as error:
            raise ValueError(str(error)) from None
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _from_union(arguments, value)
    if origin is tuple:
        return _from_tuple(arguments, value)
    if origin is not None and origin is not Literal:
        return {from_plain(_key(arguments[0]), key): from_plain(arguments[1], item) for key, item in value.items()}
    if kind is float and isinstance(value, int):
        return float(value)
    if kind is int and isinstance(value, str):  # a key of an object
        return int(value)
    if isinstance(kind, type) and not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, found {value!r}")
    return value


def _from_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return from_plain(others[0], value)
    if type(value) not in others:
        raise ValueError(f"expected one of {others}, found {value!r}")
    return value


def _from_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {value!r}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], item) for item in value)
    return tuple(from_plain(kind, item) for kind, item in zip(kinds, value, strict=True))


def _key(kind: Any) -> Any:
    return kind if kind in (int, str) else str


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
