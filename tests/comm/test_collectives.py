"""Every transport gives the sums and gathers of plain arithmetic; those that sum in rank order give the same bits."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.comm import Axis, Mesh, ParallelDims, Terms, World, regions_of
from lowtide.zero.codec import NOTHING, sum_with_held
from tests.kit.ranks import RankPool

ROUTES = ["shared_memory", "sockets", "native"]
NUMELS = [1, 7, 1024, 5000, 300_001]  # of one rank's part; the last is more than one chunk of a sum
Found = dict[str, Any]


def data(numel: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` contributes: other values on every rank and for every size."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def sharded(size: int) -> ParallelDims:
    """One axis of all ranks."""
    return ParallelDims((("shard", size),), data=("shard",))


def axis_of(transport: str) -> tuple[Mesh, Axis]:
    world = World.join("cpu", 30.0)
    mesh = Mesh.create(world, sharded(world.size), transport, 1 << 24, "shard")
    mesh.axes["shard"].transport.reserve_slots(4 * world.size * max(NUMELS), 3)
    return mesh, mesh.axes["shard"]


def gathers(transport: str) -> list[Tensor]:
    _, axis = axis_of(transport)
    found = []
    for numel in NUMELS:
        full = axis.transport.allocate([(axis.size * numel, torch.float32)])[0]
        part = torch.empty(numel)
        if axis.transport.copies_are_shared:
            part = full[axis.rank * numel : (axis.rank + 1) * numel]
        part.copy_(data(numel, axis.rank))
        axis.transport.fence("test")
        axis.transport.gather(full, part, "test").wait()
        found.append(full.clone())
    axis.transport.fence("test")
    return found


def finish(
    axis: Axis, terms: Terms, out: Tensor, held: slice = NOTHING, accumulate: bool = False
) -> tuple[int, Tensor, list[Tensor]]:
    """Adds up what has come. Returns what this rank has summed: its offset, the sum, and the terms."""
    terms.arrived.wait()
    parts = terms.read()
    sent = [part.clone() for part in parts]
    sum_with_held(parts, axis.rank, out[terms.region], held, accumulate)
    total = out[terms.region].clone()
    spread = terms.summed()
    if spread is not None:
        spread.wait()
    return terms.region.start, total, sent


def reductions(transport: str, kind: str, dtype: torch.dtype = torch.float32) -> list[Found]:
    """One entry a size: the result, and what this rank has summed."""
    _, axis = axis_of(transport)
    found = []
    for numel in NUMELS:
        for accumulate in (False, True) if kind == "reduce_scatter" else (False,):
            slot_numel = axis.size * numel if kind == "reduce_scatter" else numel
            slot = axis.transport.open_slot(slot_numel, dtype, "test")
            slot.copy_(data(slot_numel, axis.rank, dtype))
            out = torch.ones(numel)
            if kind == "reduce_scatter":
                terms = axis.transport.reduce_scatter(slot, None if accumulate else out, "test")
            else:
                terms = axis.transport.all_reduce(slot, out, "test")
            summed = finish(axis, terms, out, accumulate=accumulate)
            found.append({"numel": numel, "accumulate": accumulate, "out": out, "summed": summed})
    axis.transport.fence("test")
    return found


def sums_of_others_parts() -> list[bool]:
    """Of messages without the own part, which is in the sum: whether terms and the sum are those of whole messages."""
    _, axis = axis_of("sockets")
    found = []
    for numel in (1, 1000):
        whole = [data(axis.size * numel, rank) for rank in range(axis.size)]
        mine = slice(axis.place * numel, (axis.place + 1) * numel)
        out = whole[axis.rank][mine].clone()
        slot = axis.transport.open_slot((axis.size - 1) * numel, torch.float32, "test")
        slot.copy_(torch.cat([whole[axis.rank][: mine.start], whole[axis.rank][mine.stop :]]))
        terms = axis.transport.reduce_scatter(slot, out, "test")
        terms.arrived.wait()
        expected = [one[mine] for one in whole]
        found.append(all(map(torch.equal, terms.read(), expected)) and terms.region == slice(0, numel))
        terms.summed()
    for numel in NUMELS:  # a rank may have no part of the smallest
        whole = [data(numel, rank) for rank in range(axis.size)]
        mine, out = regions_of(numel, axis.size)[axis.rank], whole[axis.rank].clone()
        slot = axis.transport.open_slot(numel - (mine.stop - mine.start), torch.float32, "test")
        slot.copy_(torch.cat([out[: mine.start], out[mine.stop :]]))
        finish(axis, axis.transport.all_reduce(slot, out, "test"), out, held=slice(0, mine.stop - mine.start))
        found.append(torch.equal(out, in_rank_order(whole)))
    axis.transport.fence("test")
    return found


def common_sums(dtype: torch.dtype, part: tuple[float, float]) -> list[Tensor]:
    """All-reduces into memory that the ranks share, over and over. part: of the own region that is held, its ends."""
    _, axis = axis_of("shared_memory")
    outs = axis.transport.allocate([(numel, torch.float32) for numel in NUMELS])
    found = []
    for round_ in range(3):
        waiting: list[Any] = []
        for out in outs:
            values = data(out.numel(), axis.rank + 10 * round_, dtype)
            slot = axis.transport.open_slot(out.numel(), dtype, "test")
            slot.copy_(values)
            mine = regions_of(out.numel(), axis.size)[axis.rank]
            numel = mine.stop - mine.start
            held = slice(int(part[0] * numel), int(part[1] * numel))
            out[mine][held].copy_(values[mine][held])
            slot[mine][held].fill_(torch.nan)
            waiting.append((axis, axis.transport.all_reduce(slot, out, "test"), out, held))
            if len(waiting) > 1:
                finish(*waiting.pop(0))
        finish(*waiting.pop())
        axis.transport.fence("test")
        found += [out.clone() for out in outs]
        axis.transport.fence("test")
    return found


def overlapping_reductions(transport: str) -> list[Tensor]:
    """As the engine does it at most: one is staged while the messages of two may be on their way."""
    _, axis = axis_of(transport)
    outs = [torch.empty(numel) for numel in NUMELS * 3]
    waiting: list[Any] = []
    for out in outs:
        slot = axis.transport.open_slot(axis.size * out.numel(), torch.float32, "test")
        slot.copy_(data(axis.size * out.numel(), axis.rank))
        if len(waiting) == 2:
            finish(*waiting.pop(0))
        waiting.append((axis, axis.transport.reduce_scatter(slot, out, "test"), out))
    for one in waiting:
        finish(*one)
    axis.transport.fence("test")
    return outs


def small_sums(transport: str) -> list[Tensor]:
    mesh, axis = axis_of(transport)
    values = [torch.tensor([axis.rank + round_, -(2**40) * axis.rank, 3]) for round_ in range(5)]
    values += [torch.arange(numel) * (axis.rank + 1) for numel in (255, 256, 600)]
    return [mesh.sum_small(value, "test") for value in values]


def contributions(world_size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [data(numel, rank, dtype) for rank in range(world_size)]


def in_rank_order(parts: list[Tensor], start: Tensor | None = None) -> Tensor:
    """The sum in float32, added in the order of the ranks."""
    total = parts[0].float() if start is None else start + parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@dataclass
class Collected:
    """What each rank has found on a transport."""

    transport: str
    world_size: int
    gathers: list[list[Tensor]]
    reductions: dict[str, list[list[Found]]]  # by their kind


def collect(transport: str) -> tuple[list[Tensor], list[Found], list[Found]]:
    return gathers(transport), reductions(transport, "reduce_scatter"), reductions(transport, "all_reduce")


@pytest.fixture(
    scope="module", params=[(transport, size) for transport in ROUTES for size in (2, 4)], ids="{0[0]}-{0[1]}".format
)
def collected(ranks: RankPool, request: pytest.FixtureRequest) -> Collected:
    """One call of the ranks for all tests."""
    transport, size = request.param
    gathered, scattered, whole = (list(found) for found in zip(*ranks(size, collect, transport), strict=True))
    return Collected(transport, size, gathered, {"reduce_scatter": scattered, "all_reduce": whole})


def test_gather_gives_every_rank_all_parts(collected: Collected) -> None:
    expected = [torch.cat(contributions(collected.world_size, numel)) for numel in NUMELS]
    for found in collected.gathers:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(collected: Collected) -> None:
    world_size = collected.world_size
    for rank, found in enumerate(collected.reductions["reduce_scatter"]):
        for case in found:
            numel = case["numel"]
            mine = slice(rank * numel, (rank + 1) * numel)
            parts = [part[mine] for part in contributions(world_size, world_size * numel)]
            start = torch.ones(numel) if case["accumulate"] else None
            exact = torch.stack(parts).double().sum(0) + (1 if case["accumulate"] else 0)
            torch.testing.assert_close(case["out"].double(), exact, rtol=1e-6, atol=1e-6)
            if collected.transport != "native":
                assert torch.equal(case["out"], in_rank_order(parts, start))


def test_all_reduce_gives_every_rank_the_whole_sum(collected: Collected) -> None:
    results = collected.reductions["all_reduce"]
    for found in results:
        for case, first in zip(found, results[0], strict=True):
            parts = contributions(collected.world_size, case["numel"])
            exact = torch.stack(parts).double().sum(0)
            torch.testing.assert_close(case["out"].double(), exact, rtol=1e-6, atol=1e-6)
            assert torch.equal(case["out"], first["out"])
            if collected.transport != "native":
                assert torch.equal(case["out"], in_rank_order(parts))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_every_element_is_summed_once(collected: Collected, kind: str) -> None:
    """By what sums in rank order; a backend sums as it likes."""
    results = collected.reductions[kind] if collected.transport != "native" else [[]]
    for index, case in enumerate(results[0]):
        numel = case["numel"]
        seen = torch.zeros(len(results) * numel if kind == "reduce_scatter" else numel, dtype=torch.int64)
        for rank, found in enumerate(results):
            offset, total, parts = found[index]["summed"]
            base = rank * numel if kind == "reduce_scatter" else 0
            place = slice(base + offset, base + offset + total.numel())
            seen[place] += 1
            assert torch.equal(total, found[index]["out"][offset : offset + total.numel()])
            for producer, part in zip(range(len(results)), parts, strict=True):
                assert torch.equal(part, data(seen.numel(), producer)[place])
        assert torch.equal(seen, torch.ones_like(seen)), (index, numel)


HELD: list[tuple[torch.dtype, tuple[float, float]]] = [
    (torch.float32, (0.0, 1.0)),
    (torch.float32, (0.3, 1.0)),
    (torch.float32, (0.2, 0.6)),
    (torch.float32, (0.0, 0.0)),
    (torch.bfloat16, (0.0, 0.0)),
]


def all_common_sums() -> list[list[Tensor]]:
    return [common_sums(dtype, part) for dtype, part in HELD]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_in_shared_memory_is_there_once_for_all(ranks: RankPool, world_size: int) -> None:
    expected = {
        dtype: [
            in_rank_order([data(numel, rank + 10 * round_, dtype) for rank in range(world_size)])
            for round_ in range(3)
            for numel in NUMELS
        ]
        for dtype in (torch.float32, torch.bfloat16)
    }
    for of_rank in ranks(world_size, all_common_sums):
        for (dtype, part), found in zip(HELD, of_rank, strict=True):
            assert all(map(torch.equal, found, expected[dtype])), (dtype, part)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_may_lack_the_own_part(ranks: RankPool, world_size: int) -> None:
    assert ranks(world_size, sums_of_others_parts) == [[True] * (2 + len(NUMELS))] * world_size


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_bf16_contributions_are_added_in_float32(ranks: RankPool, transport: str, kind: str) -> None:
    for rank, found in enumerate(ranks(2, reductions, transport, kind, torch.bfloat16)):
        for case in found:
            numel = case["numel"]
            scattered = kind == "reduce_scatter"
            parts = contributions(2, 2 * numel if scattered else numel, torch.bfloat16)
            mine = slice(rank * numel, (rank + 1) * numel) if scattered else slice(0, numel)
            start = torch.ones(numel) if case["accumulate"] else None
            assert torch.equal(case["out"], in_rank_order([part[mine] for part in parts], start))


@pytest.mark.parametrize("transport", ROUTES)
def test_reductions_may_overlap(ranks: RankPool, transport: str) -> None:
    for rank, outs in enumerate(ranks(3, overlapping_reductions, transport)):
        for out in outs:
            numel = out.numel()
            exact = torch.stack(contributions(3, 3 * numel)).double().sum(0)[rank * numel : (rank + 1) * numel]
            torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transport", ROUTES)
def test_small_integers_are_summed_exactly(ranks: RankPool, transport: str) -> None:
    for found in ranks(4, small_sums, transport):
        assert [value.tolist() for value in found[:5]] == [[6 + 4 * r, -(2**40) * 6, 12] for r in range(5)]
        assert all(torch.equal(value, torch.arange(value.numel()) * 10) for value in found[5:])


def test_a_single_rank_is_its_own_sum() -> None:
    world = World.join("cpu", 30.0)
    try:
        axis = Mesh.create(world, sharded(1), "auto", 0, "shard").axes["shard"]
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
