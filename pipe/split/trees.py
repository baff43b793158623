"""Traverse values nested in tuples, lists, mappings and dataclasses, as modules take and return them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor, in the place of the tensor in a description."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorShape:
        return TensorShape(tuple(tensor.shape), tensor.dtype)


def leaves(value: Any) -> Iterator[Any]:
    """Iterate over the values that are no containers, in order."""
    parts = _parts(value)
    if parts is None:
        yield value
    else:
        for part in parts.values():
            yield from leaves(part)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to every leaf. A container whose leaves do not change is returned itself."""
    parts = _parts(value)
    if parts is None:
        return change(value)
    changed = {key: map_leaves(change, part) for key, part in parts.items()}
    if all(changed[key] is parts[key] for key in parts):
        return value
    return _rebuilt(value, changed)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return None  # most values: answer early
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return value
    if _is_dataclass(value):
        # `dataclasses.replace` sets no other fields.
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return None


def _rebuilt(value: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, (tuple, list)):
        return type(value)(parts.values())
    if _is_dataclass(value):
        # Outputs of transformers are dictionaries and dataclasses. Their constructors take fields.
        return type(value)(**parts) if isinstance(value, dict) else dataclasses.replace(value, **parts)
    return type(value)(parts)


def _is_dataclass(value: Any) -> bool:
    # A `TensorShape` stands for a tensor, so it is a leaf.
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorShape))
