"""An absent tensor tells its shape, and nothing that it does not know."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide.pipe.split.absent import Absent, is_missing, resolved
from tests.kit.training import refusal


def absent(*shape: int, dtype: torch.dtype = torch.float32) -> Absent:
    return Absent(shape, dtype, torch.device("cpu"), "embedding.weight")


OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 1,
    lambda x: torch.ones(3, 1) * x,
    lambda x: torch.cat([x, torch.zeros(2, 4)], 0),
    lambda x: x.T,
    lambda x: x.data,
    lambda x: x[:, None, 1:].expand(3, 2, 3),
    lambda x: functional.linear(x, torch.ones(5, 4)),
    lambda x: functional.embedding(torch.tensor([0, 2]), x),
    lambda x: functional.dropout(x, 0.5),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.to("cpu", torch.float64),
    lambda x: x.to(device=torch.device("cpu")).cpu(),
    lambda x: x.split([1, 3], 1)[1],
    lambda x: x.softmax(-1).argmax(-1),
    lambda x: x.contiguous().requires_grad_(),
    lambda x: torch.where(torch.ones(4, dtype=torch.bool), x, 0.0),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_gives_an_absent_tensor_of_the_right_shape_dtype_and_device(
    operation: Callable[[Tensor], Tensor],
) -> None:
    found, expected = operation(absent(3, 4)), operation(torch.ones(3, 4))
    assert is_missing(found) and getattr(found, "origin", None) == "embedding.weight"
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)


def test_metadata_is_at_hand() -> None:
    x = absent(3, 4)
    assert (x.shape, x.size(1), x.dim(), x.ndim, len(x), x.numel()) == ((3, 4), 4, 2, 2, 3, 12)
    assert x.device == torch.device("cpu") and x.is_floating_point() and not x.requires_grad and not x.is_meta
    assert repr(x) == "Absent((3, 4), torch.float32, from 'embedding.weight')"


def test_what_needs_the_shape_only_is_real_and_random_numbers_are_drawn_as_for_a_real_one() -> None:
    x = absent(3, 4, dtype=torch.float64)
    for made in (x.new_ones(2), torch.ones_like(x), torch.zeros(2, device=x.device, dtype=x.dtype)):
        assert type(made) is Tensor and made.dtype == torch.float64
    assert torch.equal(torch.ones_like(x), torch.ones(3, 4, dtype=torch.float64))
    assert torch.equal(torch.arange(4).expand_as(x), torch.arange(4).expand(3, 4))
    assert type(torch.ones(2).type_as(x)) is Tensor and torch.ones(2).to(x).dtype == torch.float64
    drawn = []
    for like in (torch.ones(3, 4), absent(3, 4)):
        torch.manual_seed(0)
        drawn.append(torch.rand_like(like))
    assert torch.equal(*drawn)


READERS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.item(),
    "__bool__": bool,
    "__float__": float,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": torch.nonzero,
    "masked_select": lambda x: torch.ones(3).masked_select(x.bool()),
    "backward": lambda x: x.backward(),
}


@pytest.mark.parametrize("name", READERS)
def test_its_values_are_refused_with_its_origin(name: str) -> None:
    assert refusal(READERS[name], absent(1)).startswith(
        f"{name} needs values that this rank does not have: they come from 'embedding.weight' of an earlier or "
        "later stage"
    )


def test_the_dispatcher_refuses_too() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        text = refusal(absent(2).add, 1)
    assert text.startswith("aten.add") and " needs values that this rank" in text


WRITES: list[Callable[[Tensor, Tensor], object]] = [
    lambda real, x: real.add_(x),
    lambda real, x: real.__setitem__(0, x[0]),
    lambda real, x: operator.iadd(real, x),
    lambda real, x: torch.add(x, 1, out=real),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_real_tensor_is_never_overwritten_with_nothing(write: Callable[[Tensor, Tensor], object]) -> None:
    text = refusal(write, torch.ones(3, 4), absent(3, 4))
    assert text.startswith("the forward writes with ") and " into a tensor of shape (3, 4)" in text


def test_writing_into_an_absent_tensor_leaves_it_absent() -> None:
    x = absent(3, 4)
    before = x
    x = operator.iadd(x, 1)
    x[0] = 5
    assert x is before and is_missing(x) and x.mul_(2) is x


def test_a_bound_value_is_used_wherever_the_old_object_is_held() -> None:
    x, other, value = absent(3, 4), absent(3, 4), torch.arange(12.0).view(3, 4).requires_grad_()
    assert resolved(x) is x
    x.bind(value)
    assert resolved(x) is value and not is_missing(x) and x.requires_grad
    assert torch.equal(x + 1, value + 1) and torch.equal(torch.cat([x, x]), torch.cat([value] * 2))
    assert x.sum().item() == 66
    (x * x).sum().backward()
    assert torch.equal(value.grad, 2 * value)
    assert is_missing(x + other)
    other.bind(torch.ones(3, 4))
    assert "writes with add_" in refusal(other.add_, absent(3, 4))
