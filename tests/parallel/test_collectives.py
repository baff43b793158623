"""What ranks exchange in the middle of a model: each collective against the same sum of parts in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide.comm import Collectives, Mesh, ParallelDims, World
from lowtide.parallel.collectives import copied, gathered, joined, parted, scattered, summed
from lowtide.parallel.sequence_attention import swapped
from tests.kit.ranks import RankPool

SHAPES = [(6, 4), (2, 12, 7), (2, 6, 900)]
NAME = "a layer"


def exchange_on(size: int, transport: str) -> Collectives:
    parallel_dims = ParallelDims((("tensor", size),), (), layers=("tensor",))
    mesh = Mesh.create(World.join("cpu", 20.0), parallel_dims, transport, 1 << 24, "tensor")
    return mesh.exchange(["tensor"])


def of_rank(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).double()


def run_all(size: int, transport: str) -> list[tuple[Tensor, Tensor]]:
    """(output, gradient of the input) of each function and shape; the gradient of the output is of another seed."""
    exchange = exchange_on(size, transport)
    found = []
    for function, dim in FUNCTIONS:
        for shape in SHAPES:
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


def expected(size: int) -> list[list[tuple[Tensor, Tensor]]]:
    """By rank: of the definitions."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(size)]
    for function, dim in FUNCTIONS:
        for shape in SHAPES:
            x = [of_rank(rank, shape) for rank in range(size)]
            for rank, (y, dx) in enumerate(by_definition(function, dim, x)):
                found[rank].append((y, dx))
    return found


def by_definition(function: Callable[..., Tensor], dim: int | None, x: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    size, along = len(x), dim or 0
    total, whole = sum(x), torch.cat(x, along)
    forward = {
        copied: lambda rank: x[rank],
        summed: lambda rank: total,
        gathered: lambda rank: whole,
        joined: lambda rank: whole,
        scattered: lambda rank: torch.as_tensor(total).chunk(size, along)[rank],
        parted: lambda rank: x[rank].chunk(size, along)[rank],
    }[function]
    y = [torch.as_tensor(forward(rank)) for rank in range(size)]
    dy = [of_rank(100 + rank, tuple(y[rank].shape)) for rank in range(size)]
    backward = {
        copied: lambda rank: sum(dy),
        summed: lambda rank: dy[rank],
        gathered: lambda rank: torch.as_tensor(sum(dy)).chunk(size, along)[rank],
        joined: lambda rank: dy[rank].chunk(size, along)[rank],
        scattered: lambda rank: torch.cat(dy, along),
        parted: lambda rank: torch.cat(dy, along),
    }[function]
    return [(y[rank], torch.as_tensor(backward(rank))) for rank in range(size)]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
def test_collectives_are_what_they_say(ranks: RankPool, transport: str) -> None:
    size = 2
    for own, wanted in zip(ranks(size, run_all, size, transport), expected(size), strict=True):
        for (y, dx), (right_y, right_dx) in zip(own, wanted, strict=True):
            torch.testing.assert_close(y, right_y)
            torch.testing.assert_close(dx, right_dx)


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
