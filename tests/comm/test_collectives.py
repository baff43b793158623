"""Every transport gives the sums and gathers of plain arithmetic; those that sum in rank order give the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.comm import Axis, Mesh, ParallelDims, Terms, World, regions_of
from lowtide.zero.codec import NOTHING, sum_with_held
from tests.kit.ranks import RankPool, on_ranks

ROUTES = ["shared_memory", "sockets", "native"]
NUMELS = [1, 7, 1024, 5000, 300_001]  # of one rank's part; the last is more than one chunk of a sum


def data(numel: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` contributes: other values on every rank and for every size."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def data_of_all(axis: Axis, numel: int, dtype: torch.dtype = torch.float32, more: int = 0) -> list[Tensor]:
    return [data(numel, rank + more, dtype) for rank in range(axis.size)]


def mesh_of(world: World, transport: str) -> Mesh:
    """One axis of all ranks."""
    return Mesh.create(world, ParallelDims((("shard", world.size),), data=("shard",)), transport, 1 << 24, "shard")


def axis_of(transport: str) -> Axis:
    axis = mesh_of(World.join("cpu", 30.0), transport).axes["shard"]
    axis.transport.reserve_slots(4 * axis.size * max(NUMELS), 3)
    return axis


def opened(axis: Axis, values: Tensor) -> Tensor:
    """A slot with these values."""
    return axis.transport.open_slot(values.numel(), values.dtype, "test").copy_(values)


def finish(axis: Axis, terms: Terms, out: Tensor, held: slice = NOTHING, accumulate: bool = False) -> None:
    """Adds up what has come."""
    terms.arrived.wait()
    sum_with_held(terms.read(), axis.rank, out[terms.region], held, accumulate)
    spread = terms.summed()
    if spread is not None:
        spread.wait()


def in_rank_order(parts: list[Tensor], start: Tensor | None = None) -> Tensor:
    """The sum in float32, added in the order of the ranks."""
    total = parts[0].float() if start is None else start + parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def check(axis: Axis, terms: Terms, out: Tensor, parts: list[Tensor], start: Tensor | None = None) -> None:
    """That `out` becomes the sum of these parts, and of `start`; a backend sums as it likes."""
    is_ordered = axis.transport.name != "native"
    terms.arrived.wait()
    if is_ordered:
        assert all(torch.equal(found, part[terms.region]) for found, part in zip(terms.read(), parts, strict=True))
    finish(axis, terms, out, accumulate=start is not None)
    if is_ordered:
        assert torch.equal(out, in_rank_order(parts, start))
    exact = torch.stack([*parts, *([] if start is None else [start])]).double().sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


def gathers_and_sums(transport: str, dtype: torch.dtype) -> tuple[list[Tensor], list[slice]]:
    """The sums that all ranks have, and which part of each this rank has made; the other results are checked here."""
    axis = axis_of(transport)
    outs, regions = [], []
    for numel in NUMELS:
        full = axis.transport.allocate([(axis.size * numel, torch.float32)])[0]
        mine = slice(axis.rank * numel, (axis.rank + 1) * numel)
        part = full[mine] if axis.transport.copies_are_shared else torch.empty(numel)
        part.copy_(data(numel, axis.rank))
        axis.transport.fence("test")
        axis.transport.gather(full, part, "test").wait()
        assert torch.equal(full, torch.cat(data_of_all(axis, numel)))
        whole = data_of_all(axis, axis.size * numel, dtype)
        for start in (None, torch.ones(numel)):
            out = torch.ones(numel)
            slot = opened(axis, whole[axis.rank])
            terms = axis.transport.reduce_scatter(slot, out if start is None else None, "test")
            check(axis, terms, out, [values[mine] for values in whole], start)
        parts, out = data_of_all(axis, numel, dtype), torch.ones(numel)
        terms = axis.transport.all_reduce(opened(axis, parts[axis.rank]), out, "test")
        regions.append(terms.region)
        check(axis, terms, out, parts)
        outs.append(out)
    axis.transport.fence("test")
    return outs, regions


@pytest.mark.parametrize(
    ("transport", "world_size", "dtype"),
    [
        *((transport, size, torch.float32) for transport in ROUTES for size in (2, 4)),
        *((transport, 2, torch.bfloat16) for transport in ROUTES[:2]),  # added in float32
    ],
    ids=str,
)
def test_gathers_and_sums_are_those_of_plain_arithmetic(
    ranks: RankPool, transport: str, world_size: int, dtype: torch.dtype
) -> None:
    found = ranks(world_size, gathers_and_sums, transport, dtype)
    for outs, _ in found:
        assert all(map(torch.equal, outs, found[0][0]))
    if transport != "native":  # each element is summed once
        for numel, *regions in zip(NUMELS, *(regions for _, regions in found), strict=True):
            assert [index for region in regions for index in range(numel)[region]] == list(range(numel))


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_a_part_of_a_sum_may_be_held(world_size: int) -> None:
    """Of messages without the own part, which is in the sum, terms and the sum are those of whole messages."""
    axis = axis_of("sockets")
    for numel in (1, 1000):
        whole = data_of_all(axis, axis.size * numel)
        mine = slice(axis.place * numel, (axis.place + 1) * numel)
        own = whole[axis.rank]
        slot = opened(axis, torch.cat([own[: mine.start], own[mine.stop :]]))
        terms = axis.transport.reduce_scatter(slot, own[mine].clone(), "test")
        terms.arrived.wait()
        assert all(map(torch.equal, terms.read(), [values[mine] for values in whole]))
        assert terms.region == slice(0, numel)
        terms.summed()
    for numel in NUMELS:  # a rank may have no part of the smallest
        whole = data_of_all(axis, numel)
        mine, out = regions_of(numel, axis.size)[axis.rank], whole[axis.rank].clone()
        slot = opened(axis, torch.cat([out[: mine.start], out[mine.stop :]]))
        finish(axis, axis.transport.all_reduce(slot, out, "test"), out, held=slice(0, mine.stop - mine.start))
        assert torch.equal(out, in_rank_order(whole))
    axis.transport.fence("test")


HELD: list[tuple[torch.dtype, tuple[float, float]]] = [
    (torch.float32, (0.0, 1.0)),
    (torch.float32, (0.3, 1.0)),
    (torch.float32, (0.2, 0.6)),
    (torch.float32, (0.0, 0.0)),
    (torch.bfloat16, (0.0, 0.0)),
]


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_a_part_of_a_sum_may_be_held_in_shared_memory(world_size: int) -> None:
    """All-reduces into memory that the ranks share, over and over, where a part of the own region is held."""
    for dtype, (begin, end) in HELD:
        axis = axis_of("shared_memory")
        outs = axis.transport.allocate([(numel, torch.float32) for numel in NUMELS])
        for round_ in range(3):
            waiting: list[Any] = []
            for out in outs:
                values = data(out.numel(), axis.rank + 10 * round_, dtype)
                slot = opened(axis, values)
                mine = regions_of(out.numel(), axis.size)[axis.rank]
                numel = mine.stop - mine.start
                held = slice(int(begin * numel), int(end * numel))
                out[mine][held].copy_(values[mine][held])
                slot[mine][held].fill_(torch.nan)
                waiting.append((axis, axis.transport.all_reduce(slot, out, "test"), out, held))
                if len(waiting) > 1:
                    finish(*waiting.pop(0))
            finish(*waiting.pop())
            axis.transport.fence("test")
            for out in outs:
                assert torch.equal(out, in_rank_order(data_of_all(axis, out.numel(), dtype, 10 * round_)))
            axis.transport.fence("test")


def overlapping_sums(transport: str) -> None:
    """As the engine does it at most: one is staged while the messages of two may be on their way."""
    axis = axis_of(transport)
    waiting: list[Any] = []
    for numel in NUMELS * 3:
        whole = data_of_all(axis, axis.size * numel)
        slot, out = opened(axis, whole[axis.rank]), torch.empty(numel)
        if len(waiting) == 2:
            check(*waiting.pop(0))
        parts = [values.chunk(axis.size)[axis.rank] for values in whole]
        waiting.append((axis, axis.transport.reduce_scatter(slot, out, "test"), out, parts))
    for one in waiting:
        check(*one)
    axis.transport.fence("test")


def small_sums(transport: str) -> None:
    mesh = mesh_of(World.join("cpu", 30.0), transport)
    rank, of_all = mesh.axes["shard"].rank, sum(range(mesh.axes["shard"].size))
    for round_ in range(5):
        found = mesh.sum_small(torch.tensor([rank + round_, -(2**40) * rank, 3]), "test")
        assert found.tolist() == [of_all + 4 * round_, -(2**40) * of_all, 12]
    for numel in (255, 256, 600):
        found = mesh.sum_small(torch.arange(numel) * (rank + 1), "test")
        assert torch.equal(found, torch.arange(numel) * (of_all + 4))


@pytest.mark.parametrize("transport", ROUTES)
def test_reductions_may_overlap_and_small_integers_are_summed_exactly(ranks: RankPool, transport: str) -> None:
    ranks(3, overlapping_sums, transport)
    ranks(4, small_sums, transport)


def test_a_single_rank_is_its_own_sum() -> None:
    world = World.join("cpu", 30.0)
    try:
        axis = mesh_of(world, "auto").axes["shard"]
        for numel, dtype in ((5, torch.bfloat16), (8, torch.bfloat16), (8, torch.float32), (5, torch.float32)):
            ahead = axis.transport.next_slot(numel, dtype)  # of which another one than the last may be opened
            assert ahead is not None and (ahead.numel(), ahead.dtype) == (numel, dtype)
            assert axis.transport.next_slot(numel, dtype) is ahead
        slot = axis.transport.open_slot(5, torch.float32, "test")
        assert slot is ahead
        slot.copy_(torch.arange(5.0))
        out = torch.ones(5)
        finish(axis, axis.transport.reduce_scatter(slot, None, "test"), out, accumulate=True)
        assert out.tolist() == [1, 2, 3, 4, 5]
        finish(axis, axis.transport.all_reduce(slot, out, "test"), out)
        assert out.tolist() == [0, 1, 2, 3, 4]
    finally:
        world.leave()
