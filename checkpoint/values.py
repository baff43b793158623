"""Convert plain Python values, such as the state of a loader or a scheduler, to JSON and back.

JSON has no tuples, bytes, tensors, or non-string keys. They are written as an object with the key "$type". Reading
builds only values of these types, so a file cannot run code.
"""

from __future__ import annotations

import base64
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .chunk_view import dtype_named, name_of
from .files import shortened

MAX_TENSOR_BYTES = 64 << 20
MAX_DEPTH = 100  # levels of nesting; Python's recursion limit allows about four times as many
_TAG = "$type"


def encode(value: Any, where: str) -> Any:
    """Convert a value to JSON.

    Takes None, bool, int, float, str, bytes, list, tuple, dict, set, NumPy arrays and scalars, tensors up to 64 MiB,
    their dtypes, and the arguments of argparse, which Megatron's scripts save. Raises ValueError, with the place below
    `where`, for other types and for too deep nesting.
    """
    try:
        encoded = _encode(value, where)
    except RecursionError:
        raise _too_deep(where) from None
    check_depth(encoded, where)
    return encoded


def decode(content: Any, where: str) -> Any:
    """Convert JSON of `encode` back. Subclasses return as their base type: a named tuple as a tuple.

    Raises ValueError for JSON that `encode` has not made.
    """
    check_depth(content, where)
    try:
        return _decode(content)
    except Exception as error:  # NumPy and torch raise many types of errors for bad content
        raise ValueError(f"{where}: expected plain values as JSON; {shortened(str(error))}") from error


def check_depth(content: Any, where: str) -> None:
    """Raise ValueError for JSON with more than MAX_DEPTH levels."""
    # Level by level: content that is nested deeper than Python's stack is the fault to find.
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> ValueError:
    return ValueError(f"{where}: expected at most {MAX_DEPTH} levels of nesting, found more")


def _encode(value: Any, where: str) -> Any:
    # Exact types: an IntEnum would return as an int. It is refused below.
    if value is None or type(value) in (bool, int, str):
        return value
    # By exact type: np.float64 is a float too, and returns as np.float64 (`_encode_array`).
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, Namespace):
        return {_TAG: "namespace", "items": _encode_mapping(vars(value), where)}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": name_of(value)}
    if type(value) is list:
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    # Sorted, so that the same set gives the same bytes: the order of a set of strings depends on the process.
    if isinstance(value, (set, frozenset)):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {_TAG: kind, "items": [_encode(item, where) for item in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _encode_array(value, where)
    raise ValueError(
        f"{where}: expected numbers, strings, bytes, None, lists, tuples, sets, dictionaries, arrays or tensors, "
        f"found {type(value).__module__}.{type(value).__qualname__}. A checkpoint holds no pickles: save plain state "
        "from which the object can be rebuilt, or give the object a state_dict() and a load_state_dict()."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    return {key: _decode(item) for key, item in value.items()} if kind is None else _DECODERS[kind](value)


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    # A dictionary of the caller may have the key "$type" itself: as pairs it is not mistaken for a tagged object.
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[_encode(key, where), _encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {_TAG: "dict", "items": pairs}


def _encode_array(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, Tensor):
        kind = {_TAG: "tensor", "dtype": name_of(value.dtype)}
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.fields:
            raise ValueError(f"{where}: expected an array of numbers, found objects or records ({array.dtype})")
        kind = {_TAG: "array" if isinstance(value, np.ndarray) else "scalar", "dtype": array.dtype.str}
        data = np.ascontiguousarray(array)
    if data.nbytes > MAX_TENSOR_BYTES:
        raise ValueError(
            f"{where}: expected at most {MAX_TENSOR_BYTES >> 20} MiB, such as counters and positions, found "
            f"{data.nbytes >> 20} MiB. Make a tensor of that size a buffer of the model."
        )
    return {**kind, "shape": list(value.shape), "base64": base64.b64encode(data.tobytes()).decode()}


def _decode_tensor(value: dict[str, Any]) -> Tensor:
    dtype = dtype_named(value["dtype"])
    # A bytearray, since torch and the caller may write to the memory. torch refuses an empty one.
    data = bytearray(base64.b64decode(value["base64"], validate=True))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def _decode_array(value: dict[str, Any]) -> Any:
    # NumPy refuses dtypes of objects here, so a file cannot name pointers.
    flat = np.frombuffer(bytearray(base64.b64decode(value["base64"], validate=True)), dtype=np.dtype(value["dtype"]))
    return flat.reshape(value["shape"])


_DECODERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["value"]),
    "namespace": lambda value: Namespace(**_decode(value["items"])),
    "dtype": lambda value: dtype_named(value["name"]),
    "tuple": lambda value: tuple(_decode(item) for item in value["items"]),
    "set": lambda value: {_decode(item) for item in value["items"]},
    "frozenset": lambda value: frozenset(_decode(item) for item in value["items"]),
    "dict": lambda value: {_decode(key): _decode(item) for key, item in value["items"]},
    "bytes": lambda value: base64.b64decode(value["base64"], validate=True),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": lambda value: _decode_array(value)[()],
}
