"""Plain values as JSON: they come back equal, in their own types, and nothing else is taken."""

import json
import math
from argparse import Namespace
from collections import Counter, OrderedDict, namedtuple
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.checkpoint.values import MAX_TENSOR_BYTES, decode, encode
from tests.kit.training import refusal

Pair = namedtuple("Pair", "first second")
SCALARS: list[Any] = [None, True, 0, -(1 << 200), 0.1, -0.0, 5e-324, math.inf, -math.inf]
TEXTS: list[Any] = ["", "\0 \u00e9 \ud800 \U0001f30a", b"", bytes(range(256))]
SEQUENCES: list[Any] = [[], [1, [2, [3]]], (), (1, (2, ()))]
MAPPINGS: list[Any] = [
    {},
    {"a": {"b": [1, 2.5]}},
    {"": 1, "$": 2},
    {"$type": "tuple", "items": [1]},
    {1: "a", "1": "b"},
    {(1, 2): {3.5: None}, True: 0},
    {frozenset({1, 2}): b"x"},
    Namespace(lr=0.1, dtype=torch.bfloat16, model=Namespace(sizes=(1, 2))),
]
SETS: list[Any] = [set(), {1, "a", (2, 3), frozenset({4})}, frozenset({frozenset(), (1,)})]


def there_and_back(value: Any) -> Any:
    """Through the text of a file."""
    return decode(json.loads(json.dumps(encode(value, "here"), allow_nan=False)), "here")


def test_values_come_back_equal_and_in_their_types() -> None:
    for value in (*SCALARS, *TEXTS, *SEQUENCES, *MAPPINGS, *SETS):
        found = there_and_back(value)
        assert repr(found) == repr(value) if not isinstance(value, (set, frozenset)) else found == value
        assert type(found) is type(value), value


def test_nan_comes_back() -> None:
    found = there_and_back([math.nan, {"a": (math.nan,)}])
    assert math.isnan(found[0]) and math.isnan(found[1]["a"][0])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Pair(1, 2), (1, 2)),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (torch.Size([2, 3]), (2, 3)),
        (bytearray(b"ab"), b"ab"),
    ],
)
def test_subclasses_come_back_as_what_they_are_made_of(value: Any, expected: Any) -> None:
    assert repr(there_and_back(value)) == repr(expected)


DTYPES = "float64 float32 float16 bfloat16 float8_e4m3fn complex64 int64 int32 int16 int8 uint8 bool"


def test_tensors_come_back_bitwise() -> None:
    for dtype, shape in product(DTYPES.split(), [(), (0,), (3, 0), (2, 3)]):
        value = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
        found = there_and_back({"t": value})["t"]
        assert found.dtype == value.dtype and found.shape == value.shape
        assert found.reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()
        if found.numel():
            found.zero_()  # it has memory of its own, and may be written to


def test_strided_and_trained_tensors_come_back_as_values() -> None:
    value = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(there_and_back(value), value)
    parameter = torch.nn.Parameter(torch.tensor([math.nan, -0.0]))
    found = there_and_back(parameter)
    assert type(found) is torch.Tensor and not found.requires_grad
    assert found.view(torch.int32).tolist() == parameter.detach().view(torch.int32).tolist()


ARRAYS: list[Any] = [
    np.arange(6).reshape(2, 3).T,
    np.zeros((0, 3), np.float32),
    np.array(["a", "bcd"]),
    np.array([True, False]),
    np.array(3.5),
    np.array([1, 2], ">i4"),
    np.array(["2026-01-01"], "datetime64[D]"),
    *(np.float32(0.1), np.float64(0.1), np.int64(7), np.bool_(True), np.str_("ab")),
]


def test_arrays_and_scalars_of_numpy_come_back() -> None:
    for value in ARRAYS:
        found = there_and_back(value)
        assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
        assert found.tolist() == value.tolist()
        assert not isinstance(found, np.ndarray) or found.flags.writeable


class Loader:
    pass


RECORD = np.dtype([("a", "i4"), ("b", "f4")])
PLAIN = "expected numbers, strings, bytes, None, lists, tuples, sets, dictionaries, arrays or tensors, found"
ADVICE = (
    ". A checkpoint holds no pickles: save plain state from which the object can be rebuilt, or give the object a "
    "state_dict() and a load_state_dict()."
)
REFUSED: list[tuple[Any, str]] = [
    ({"loaders": [1, {"train": Loader()}]}, f"here.loaders[1].train: {PLAIN} {__name__}.Loader{ADVICE}"),
    ({(1, 2): (1j,)}, f"here[(1, 2)][0]: {PLAIN} builtins.complex{ADVICE}"),
    (np.array([Loader()]), "here: expected an array of numbers, found objects or records (object)"),
    (np.zeros(2, RECORD), f"here: expected an array of numbers, found objects or records ({RECORD})"),
    (
        {"cache": torch.empty(MAX_TENSOR_BYTES + (1 << 20), dtype=torch.uint8)},
        "here.cache: expected at most 64 MiB, such as counters and positions, found 65 MiB. "
        "Make a tensor of that size a buffer of the model.",
    ),
]


@pytest.mark.parametrize(("value", "text"), REFUSED, ids=range(len(REFUSED)))
def test_other_values_are_refused_by_their_place(value: Any, text: str) -> None:
    assert refusal(encode, value, "here") == text


def test_a_tensor_of_the_largest_size_is_taken() -> None:
    encode(torch.empty(8, dtype=torch.uint8).expand(1 << 20, 8)[: MAX_TENSOR_BYTES >> 24], "here")
