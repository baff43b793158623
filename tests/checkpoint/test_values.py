"""Plain values as JSON: they come back equal, in their own types, and nothing else is taken."""

import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.checkpoint.values import MAX_TENSOR_BYTES, decode, encode

Pair = namedtuple("Pair", "first second")


def there_and_back(value: Any) -> Any:
    """Through the text of a file."""
    return decode(json.loads(json.dumps(encode(value, "here"), allow_nan=False)), "here")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 200),
        0.1,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "\0 \u00e9 \ud800 \U0001f30a",
        b"",
        bytes(range(256)),
        [],
        [1, [2, [3]]],
        (),
        (1, (2, ())),
        {},
        {"a": {"b": [1, 2.5]}},
        {"": 1, "$": 2},
        {"$type": "tuple", "items": [1]},
        {1: "a", "1": "b"},
        {(1, 2): {3.5: None}, True: 0},
        {frozenset({1, 2}): b"x"},
        set(),
        {1, "a", (2, 3), frozenset({4})},
        frozenset({frozenset(), (1,)}),
    ],
    ids=repr,
)
def test_values_come_back_equal_and_in_their_types(value: Any) -> None:
    found = there_and_back(value)
    assert repr(found) == repr(value) if not isinstance(value, (set, frozenset)) else found == value
    assert type(found) is type(value)


def test_nan_comes_back() -> None:
    found = there_and_back([math.nan, {"a": (math.nan,)}])
    assert math.isnan(found[0]) and math.isnan(found[1]["a"][0])


def test_subclasses_come_back_as_what_they_are_made_of() -> None:
    assert there_and_back(Pair(1, 2)) == (1, 2)
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert list(there_and_back(OrderedDict(b=1, a=2))) == ["b", "a"]
    assert there_and_back(Counter("aab")) == {"a": 2, "b": 1}
    assert there_and_back(torch.Size([2, 3])) == (2, 3)
    assert there_and_back(bytearray(b"ab")) == b"ab"


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_tensors_come_back_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = there_and_back({"t": value})["t"]
    assert found.dtype == dtype and found.shape == value.shape
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


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3), np.float32),
        np.array(["a", "bcd"]),
        np.array([True, False]),
        np.array(3.5),
        np.array([1, 2], ">i4"),
        np.array(["2026-01-01"], "datetime64[D]"),
    ],
    ids=repr,
)
def test_arrays_come_back(value: np.ndarray) -> None:
    found = there_and_back(value)
    assert type(found) is np.ndarray and found.dtype == value.dtype and found.shape == value.shape
    assert found.tolist() == value.tolist() and found.flags.writeable


@pytest.mark.parametrize("value", [np.float32(0.1), np.float64(0.1), np.int64(7), np.bool_(True), np.str_("ab")])
def test_scalars_of_numpy_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


def test_the_random_state_of_numpy_comes_back() -> None:
    generator = np.random.RandomState(3)
    saved = there_and_back(generator.get_state())
    expected = generator.rand(5).tolist()
    generator.set_state(saved)
    assert generator.rand(5).tolist() == expected


class Loader:
    pass


def test_another_object_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError) as caught:
        encode({"loaders": [1, {"train": Loader()}]}, "client_state")
    assert str(caught.value) == (
        "client_state.loaders[1].train: expected numbers, strings, bytes, None, lists, tuples, sets, dictionaries, "
        f"arrays or tensors, found {__name__}.Loader. A checkpoint holds no pickles: save plain state from which the "
        "object can be rebuilt, or give the object a state_dict() and a load_state_dict()."
    )
    with pytest.raises(ValueError, match=r"client_state\[\(1, 2\)\]\[0\]: expected numbers.*found builtins.complex\."):
        encode({(1, 2): (1j,)}, "client_state")


@pytest.mark.parametrize("value", [np.array([Loader()]), np.zeros(2, [("a", "i4"), ("b", "f4")])], ids=["o", "r"])
def test_arrays_of_other_than_numbers_are_refused(value: np.ndarray) -> None:
    with pytest.raises(ValueError, match="here: expected an array of numbers, found objects or records"):
        encode(value, "here")


def test_large_tensors_are_refused() -> None:
    encode(torch.empty(8, dtype=torch.uint8).expand(1 << 20, 8)[: MAX_TENSOR_BYTES >> 24], "here")
    with pytest.raises(ValueError) as caught:
        encode({"cache": torch.empty(MAX_TENSOR_BYTES + (1 << 20), dtype=torch.uint8)}, "client_state")
    assert str(caught.value) == (
        "client_state.cache: expected at most 64 MiB, such as counters and positions, found 65 MiB. "
        "Make a tensor of that size a buffer of the model."
    )
