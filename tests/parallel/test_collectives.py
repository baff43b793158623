"""What ranks exchange in the middle of a model against the same in one process, and losses of logits in parts."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide.comm import Axis, Collectives, Mesh, ParallelDims, World
from lowtide.comm.axis import SoloTransport
from lowtide.parallel.collectives import copied, gathered, joined, parted, scattered, summed
from lowtide.parallel.sequence_attention import swapped
from lowtide.parallel.splits import ranges_of
from lowtide.parallel.vocab_parallel import VocabParallelLogits
from tests.kit.ranks import on_ranks
from tests.kit.training import refusal

SHAPES = [(6, 4), (2, 12, 7), (2, 6, 900)]
NAME = "a layer"


def exchange_on(size: int, transport: str) -> Collectives:
    parallel_dims = ParallelDims((("tensor", size),), (), layers=("tensor",))
    mesh = Mesh.create(World.join("cpu", 20.0), parallel_dims, transport, 1 << 24, "tensor")
    return mesh.exchange(["tensor"])


def alone_at(size: int, place: int) -> Collectives:
    """Of a rank that exchanges nothing."""
    places = tuple(range(size))
    return Collectives(Axis("sequence", place, places, places, SoloTransport(torch.device("cpu"))))


def of_rank(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).double()


FUNCTIONS: list[tuple[Callable[..., Tensor], int | None]] = [
    (copied, None),
    (summed, None),
    *((one, dim) for one in (gathered, scattered, joined, parted) for dim in (0, 1)),
]


def by_definition(function: Callable[..., Tensor], dim: int | None, x: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """By rank."""
    size, along = len(x), dim or 0
    total, whole = torch.stack(x).sum(0), torch.cat(x, along)
    y: list[Tensor] = {
        copied: lambda: x,
        summed: lambda: [total] * size,
        gathered: lambda: [whole] * size,
        joined: lambda: [whole] * size,
        scattered: lambda: list(total.chunk(size, along)),
        parted: lambda: [one.chunk(size, along)[rank] for rank, one in enumerate(x)],
    }[function]()
    dy = [of_rank(100 + rank, tuple(one.shape)) for rank, one in enumerate(y)]
    sum_of_dy, whole_dy = torch.stack(dy).sum(0), torch.cat(dy, along)
    dx: list[Tensor] = {
        copied: lambda: [sum_of_dy] * size,
        summed: lambda: dy,
        gathered: lambda: list(sum_of_dy.chunk(size, along)),
        joined: lambda: [one.chunk(size, along)[rank] for rank, one in enumerate(dy)],
        scattered: lambda: [whole_dy] * size,
        parted: lambda: [whole_dy] * size,
    }[function]()
    return list(zip(y, dx, strict=True))


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
@on_ranks(2)
def test_collectives_are_what_they_say(transport: str) -> None:
    """The gradient of the output is of another seed."""
    exchange = exchange_on(2, transport)
    for (function, dim), shape in product(FUNCTIONS, SHAPES):
        x = of_rank(exchange.place, shape).requires_grad_()
        y = function(x, exchange, *(() if dim is None else (dim,)), NAME)
        y.backward(of_rank(100 + exchange.place, tuple(y.shape)))
        right = by_definition(function, dim, [of_rank(rank, shape) for rank in range(2)])[exchange.place]
        torch.testing.assert_close((y.detach(), x.grad), right)


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
@on_ranks(2)
def test_the_first_message_may_be_empty(transport: str) -> None:
    exchange = exchange_on(2, transport)
    assert exchange.gather(torch.empty(0, 3), 1, NAME).shape == (0, 6)
    exchange.release_slots()
    assert exchange.sum_part(torch.empty(4, 0), 0, NAME).shape == (2, 0)
    exchange.release_slots()
    assert exchange.shift(torch.empty(0, 3), 1, NAME)().shape == (0, 3)


@on_ranks(2)
def test_a_backend_sums_where_the_sum_is_used() -> None:
    """No copy follows it, and none comes before the sum of a part, which only reads the terms."""
    exchange, shape = exchange_on(2, "native"), (6, 4)
    transport, x = exchange._axis.transport, of_rank(exchange.place, shape)
    with patch.object(transport, "all_reduce", wraps=transport.all_reduce) as called:
        total = exchange.sum(x, NAME)
    assert called.call_args.args[0].data_ptr() == total.data_ptr()
    with patch.object(transport, "reduce_scatter", wraps=transport.reduce_scatter) as called:
        part = exchange.sum_part(x, 0, NAME)
    terms, out, _ = called.call_args.args
    assert (terms.data_ptr(), out.data_ptr()) == (x.data_ptr(), part.data_ptr())
    assert torch.equal(x, of_rank(exchange.place, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(4)
def test_all_ranks_have_the_bits_of_a_sum_that_is_rounded_once(dtype: torch.dtype) -> None:
    exchange = exchange_on(4, "shared_memory")
    terms = [of_rank(rank, (3000,)).to(dtype) for rank in range(4)]
    found = exchange.sum(terms[exchange.place], NAME)
    a, b, c, d = (term.float() for term in terms)
    assert torch.equal(found, (((a + b) + c) + d).to(dtype))


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
@on_ranks(2)
def test_what_ranks_have_for_each_other_is_swapped(transport: str) -> None:
    exchange = exchange_on(2, transport)
    given = torch.stack([of_rank(rank, (2, 3, 5)) for rank in range(2)])
    x = given[exchange.place].clone().requires_grad_()
    y = swapped(x, exchange, NAME)
    (y * y.detach()).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x)  # the gradient of y has gone the way back
    assert torch.equal(y.detach(), given[:, exchange.place])


TOKENS, NUMEL = 6, 7  # two ranks have three and four


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, NUMEL, (2, TOKENS // 2), generator=generator)
    target[0, 0] = -100
    return torch.randn(2, TOKENS // 2, NUMEL, generator=generator).double(), target


def trained(value: float) -> Tensor:
    """Its gradient is of all logits, and has to be that on each rank."""
    scale = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    scale.register_hook(SCALES.append)
    return scale


SCALES: list[Tensor] = []  # gradients of scales
USES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, t: functional.cross_entropy(x.view(-1, NUMEL), t.view(-1)),
    "module": lambda x, t: torch.nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), t.flatten()),
    "each token": lambda x, t: (
        functional.cross_entropy(x.reshape(-1, 7) * 0.5, t.flatten(), reduction="none").square().sum()
    ),
    "ignored": lambda x, t: functional.cross_entropy(x[:, 1:].flatten(0, 1), t[:, 1:].flatten(), ignore_index=2),
    "by place": lambda x, t: functional.cross_entropy(x.view(-1, 7), t.relu().view(-1), None, None, 3, None, "sum"),
    "smoothed, of all": lambda x, t: functional.cross_entropy(x.view(-1, 7), t.view(-1), label_smoothing=0.1),
    "softmax, of all": lambda x, t: torch.softmax(x, dim=-1)[..., 0].square().sum(),
    "an index before the rest": lambda x, t: x[:, :, 3, ...].square().sum() + x[0, ..., :].sum(),
    "in a list, of all": lambda x, t: torch.cat([x, 2 * x]).square().sum(),
    "compared, of all": lambda x, t: ((x < 0.5) * (x != 1) * (1 - x) ** 2).sum(),
    "negative": lambda x, t: functional.cross_entropy((-x).reshape(shape=(-1, 7)), t.view(-1)),
    "a scale that is trained, of all": lambda x, t: (trained(2.0) * x * trained(3.0)).square().sum(),
    "one behind them, of all": lambda x, t: (x * trained(2.0)).square().sum(),
    "another shape, of all": lambda x, t: x.flatten().logsumexp(0),
}


CHANGES: dict[str, Callable[[Any], object]] = {
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.0),
    "relu_": lambda x: torch.relu_(x),
    "[...] =": lambda x: x.__setitem__(0, 0.0),
}


def test_a_change_in_place_and_a_target_that_is_no_token_are_refused() -> None:
    for name, change in CHANGES.items():
        parts = VocabParallelLogits(torch.ones(2, NUMEL), NUMEL, 0, alone_at(1, 0))
        text = refusal(change, parts, kind=TypeError)
        assert f"cannot be changed in place, found {name}; use a function" in text
    for name, given in (("register_hook", (print,)), ("retain_grad", ())):
        parts = VocabParallelLogits(torch.ones(2, NUMEL, requires_grad=True), NUMEL, 0, alone_at(1, 0))
        text = refusal(lambda: getattr(parts, name)(*given), kind=TypeError)  # noqa: B023  (called at once)
        assert text.startswith(f"{name}: logits of a head that parallel.tensor has split have no gradient of all")
    x, target = logits()
    parts = VocabParallelLogits(x[0], NUMEL, 0, alone_at(1, 0))
    text = refusal(parts.cross_entropy, target[0] + NUMEL, -100, kind=IndexError)
    assert text.startswith("Target ") and "out of bounds" in text


@on_ranks(2)
def test_logits_in_parts_are_used_as_all_of_them() -> None:
    exchange = exchange_on(2, "shared_memory")
    low, high = ranges_of(NUMEL, 2)[exchange.place]
    for name, use in USES.items():
        found = []
        for is_part in (True, False):
            x, target = logits()
            x = (x[..., low:high].clone() if is_part else x).requires_grad_()
            SCALES.clear()
            loss = use(VocabParallelLogits(x, NUMEL, low, exchange) if is_part else x, target)
            loss.backward()
            assert x.grad is not None
            found.append((loss.detach(), x.grad if is_part else x.grad[..., low:high], list(SCALES)))
        torch.testing.assert_close(*found, msg=f"{name}: {{}}".format)
