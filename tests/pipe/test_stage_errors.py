"""What a stage refuses, and with which words. An absent tensor tells its shape, and nothing that it does not know."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.pipe.split.absent import Absent, is_missing, resolved
from lowtide.pipe.split.carried import Carried
from lowtide.pipe.stage import Stage
from tests.kit import models
from tests.kit.training import refusal
from tests.pipe.staged import staged, stages_of

X, Y = models.vector_batch(0, 6)


def call(model: nn.Module) -> Any:
    return model(X, Y)


def three(build: Callable[[], nn.Module] = models.Mlp) -> list[Stage]:
    return stages_of(build, 3)


def run_first(build: Callable[[], nn.Module]) -> None:
    three(build)[0].run(call)


def run_all(build: Callable[[], nn.Module]) -> None:
    staged(three(build), call)


class Ordered(models.Mlp):
    """Calls its layers in this order. directly: by block.forward."""

    def __init__(self, *order: int, directly: bool = False) -> None:
        super().__init__()
        self.order, self.directly = order, directly

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            layer = self.layers[number]
            x = layer.forward(x) if self.directly else layer(x)
        return functional.mse_loss(self.last(x), y)


class DynamicCache:
    """Stands for a store of keys and values."""


class Returns(models.Mlp):
    """Its layers return something beside a tensor."""

    class Layer(nn.Linear):
        beside: Any

        def forward(self, given: Any) -> Any:
            return super().forward(given[0] if isinstance(given, tuple) else given), self.beside

    def __init__(self, beside: object) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.Layer(7, 7) for _ in range(3)))
        for layer in self.layers:
            setattr(layer, "beside", beside)  # noqa: B010

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.last(x[0]), y)


class Hidden(models.Mlp):
    """Adds an element of what was made before the blocks, in a way that no look ahead sees."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = torch.tanh(self.first(x))
        x = start
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 2 and not hasattr(self.layers[0].weight, "origin"):
                return functional.mse_loss(self.last(x), y)
            x = self.layers[2](x + start) if number == 1 and type(x) is Tensor else x
        return functional.mse_loss(self.last(x), y)


class Reads(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * float(self.first.bias[0])


class Writes(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        whole = torch.zeros(6, models.FEATURES)
        whole[:, :3] = x[:, :3] * self.first.weight.mean()
        return super().forward(whole, y)


class LooksAtItself(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        computed = type(self.first.weight) is nn.Parameter
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if computed else layer(x, None)
        return functional.mse_loss(self.last(x), y)


def run_second(change: Callable[[Carried], Carried | None]) -> None:
    """With something else than what the first stage has sent."""
    first, second, _ = three()
    second.run(call, change(first.run(call)))


def run_the_first_with_its_own_output() -> None:
    first = three()[0]
    first.run(call, first.run(call))


def run_backwards() -> None:
    received = stages_of(models.Mlp, 2, [1, 2])[0].run(call)
    stages_of(partial(Ordered, 0, 2, 1), 2, [1, 2])[1].run(call, received)


def run_the_last_directly() -> None:
    output = three()[1].run(call, three()[0].run(call))
    three(partial(Ordered, 0, 1, 2, directly=True))[2].run(call, output)


UNSENT = (
    "pipeline: expected 'layers.0' to return tensors, numbers, strings and None, nested in tuples, lists and "
    "dictionaries, found "
)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an object": (
        partial(run_first, partial(Returns, object())),
        f"{UNSENT}object, a type that cannot be sent to the next stage",
    ),
    "a cache": (
        partial(run_first, partial(Returns, DynamicCache())),
        f"{UNSENT}DynamicCache, a type that cannot be sent to the next stage; set use_cache to False",
    ),
    "it stops early": (
        partial(run_first, partial(Ordered, 0)),
        "pipeline: the forward finished on stage 0 without a call of 'layers.1', the first block of the next stage; "
        "the model must call each block, as block(...) and not block.forward(...), for every batch",
    ),
    "it calls block.forward": (
        run_the_last_directly,
        "pipeline: the forward finished on stage 2 without a call of 'layers.2', the first block of this stage",
    ),
    "it skips a stage": (
        partial(run_first, partial(Ordered, 1, 2)),
        "pipeline: the forward came to 'layers.1' and has called no block of stage 0 (layers.0 to layers.0); it must "
        "call at least one block of each stage",
    ),
    "another order": (
        run_backwards,
        "pipeline: expected a forward that calls the blocks in the order layers.0 ... layers.2, found a call of "
        "'layers.1' after 'layers.2'; register the blocks in a single list, in the order of their calls",
    ),
    "a hidden use": (
        lambda: staged(stages_of(Hidden, 2, [1, 2]), call),
        "pipeline: 'layers.2' takes a tensor of shape (6, 7) that stage 1 (layers.1 to layers.2) does not have: it "
        "comes from 'first.weight', and 'layers.1' does not take it as an argument; pass it to every block",
    ),
    "a loss that reads a value of another stage": (
        partial(run_all, Reads),
        "__float__ needs values that pipeline stage 2 does not have: they come from 'first.bias' of an earlier or "
        "later stage",
    ),
    "absent values written into a tensor": (
        partial(run_all, Writes),
        "the forward writes with __setitem__ into a tensor of shape (6, 5), with values that pipeline stage 1 does "
        "not have: they come from 'first.weight' of an earlier or later stage; build the tensor from its parts "
        "(torch.cat, torch.where), or move this code into a block",
    ),
    "another course where values are absent": (
        partial(run_first, LooksAtItself),
        "pipeline: 'layers.1' is called with 1 arguments on stage 0 and with 2 on stage 1: their forwards take "
        "different branches. Outside the blocks, a forward must not depend on values that a block computes",
    ),
    "another shape": (
        partial(run_second, lambda sent: Carried((torch.zeros(4, 7),), sent.spec)),
        "pipeline: stage 1 received a tensor of shape (4, 7) for 'layers.1', expected (6, 7): it belongs to a "
        "different microbatch",
    ),
    "other arguments": (
        partial(run_second, lambda sent: Carried(sent.tensors, replace(sent.spec, num_arguments=3))),
        "pipeline: 'layers.1' takes 1 arguments on stage 1, but 3 on the previous stage ('layers.1'): the stages got "
        "different batches, or the forward depends on the rank",
    ),
    "received on the first stage": (
        run_the_first_with_its_own_output,
        "pipeline: stage 0 expected nothing as `received`, found a Carried",
    ),
    "nothing received": (
        partial(run_second, lambda sent: None),
        "pipeline: stage 1 expected the output of stage 0 as `received`, found nothing",
    ),
    "a block of another rank": (
        lambda: three()[1].module.get_submodule("layers.0")(torch.zeros(1, 7)),
        "pipeline: 'layers.0' is not on this rank, which has stage 1 of 3; with a pipeline, call the engine "
        "and not the module",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused(name: str) -> None:
    action, text = REFUSED[name]
    assert text in refusal(action)


def test_what_is_not_carried_may_be_anything() -> None:
    stages_of(partial(Returns, object()), 1)[0].run(call)
    assert three()[1].module.get_submodule("layers.1")(torch.zeros(1, 7)).shape == (1, 7)


def test_after_an_error_the_stage_runs_again() -> None:
    first = three()[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        first.run(lambda model: model(X[:, :2], Y))
    assert isinstance(first.run(call), Carried)


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
