"""What ranks exchange in the middle of a model: each collective against the same sum of parts in one process."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from lowtide.comm import Axis, Collectives, Mesh, ParallelDims, World
from lowtide.comm.axis import SoloTransport
from lowtide.parallel.collectives import copied, gathered, joined, parted, scattered, summed
from lowtide.parallel.sequence_attention import swapped
from tests.kit.ranks import RankPool

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


def run_all(size: int, transport: str) -> list[tuple[Tensor, Tensor]]:
    """(output, gradient of the input) of each function and shape; the gradient of the output is of another seed."""
    exchange = exchange_on(size, transport)
    found = []
    for (function, dim), shape in product(FUNCTIONS, SHAPES):
        x = of_rank(exchange.place, shape).requires_grad_()
        y = function(x, exchange, *(() if dim is None else (dim,)), NAME)
        y.backward(of_rank(100 + exchange.place, tuple(y.shape)))
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    return found


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
def test_collectives_are_what_they_say(ranks: RankPool, transport: str) -> None:
    found = zip(*ranks(2, run_all, 2, transport), strict=True)
    for ((function, dim), shape), of_ranks in zip(product(FUNCTIONS, SHAPES), found, strict=True):
        right = by_definition(function, dim, [of_rank(rank, shape) for rank in range(2)])
        torch.testing.assert_close(list(of_ranks), right)


def bits_of_sums(dtype: torch.dtype) -> list[int]:
    exchange = exchange_on(4, "shared_memory")
    total = exchange.sum(of_rank(exchange.place, (3000,)).to(dtype), NAME)
    return total.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ranks_have_the_bits_of_a_sum_that_is_rounded_once(ranks: RankPool, dtype: torch.dtype) -> None:
    found = ranks(4, bits_of_sums, dtype)
    terms = [of_rank(rank, (3000,)).to(dtype).float() for rank in range(4)]
    right = (((terms[0] + terms[1]) + terms[2]) + terms[3]).to(dtype)
    assert found == [right.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).tolist()] * 4


def swaps(transport: str) -> Tensor:
    exchange = exchange_on(2, transport)
    x = of_rank(exchange.place, (2, 3, 5)).requires_grad_()
    y = swapped(x, exchange, NAME)
    (y * y.detach()).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x)  # the gradient of y has gone the way back
    return y.detach()


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
def test_what_ranks_have_for_each_other_is_swapped(ranks: RankPool, transport: str) -> None:
    given = torch.stack([of_rank(rank, (2, 3, 5)) for rank in range(2)])
    for rank, got in enumerate(ranks(2, swaps, transport)):
        assert torch.equal(got, given[:, rank])
