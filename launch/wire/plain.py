"""Frozen dataclasses as plain JSON values and back, by their type hints."""

import dataclasses
import reprlib
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
        return _from_object(kind, value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _from_union(arguments, value)
    if origin is tuple:
        return _from_tuple(arguments, value)
    if origin is Literal:
        if value not in arguments:
            raise _unexpected(f"one of {arguments}", value)
        return value
    if origin is not None:
        _check_type(dict, value)
        return {_from_key(arguments[0], key): from_plain(arguments[1], item) for key, item in value.items()}
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _unexpected("float", value) from None
    _check_type(kind, value)
    return value


def _check_type(kind: type, value: Any) -> None:
    if type(value) is not kind:  # a bool is no int here
        raise _unexpected(kind.__name__, value)


def _unexpected(what: str, value: Any) -> ValueError:
    return ValueError(f"expected {what}, found {reprlib.repr(value)}")


def _from_object(kind: Any, value: Any) -> Any:
    _check_type(dict, value)
    hints = _hints(kind)
    known = {name: from_plain(hints[name], item) for name, item in value.items() if name in hints}
    try:
        return kind(**known)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def _from_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return from_plain(others[0], value)
    if type(value) not in others:
        raise _unexpected(f"one of {others}", value)
    return value


def _from_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    _check_type(list, value)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], item) for item in value)
    return tuple(from_plain(kind, item) for kind, item in zip(kinds, value, strict=True))


def _from_key(kind: Any, key: str) -> Any:
    """Keys of objects are text."""
    return int(key) if kind is int else key


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
