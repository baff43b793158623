"""A rank has a range of any chunk of a tensor: columns, rows, experts. Every split reads what any other has written."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint import writer
from lowtide.checkpoint.chunk_view import ChunkView, TensorInfo, chunks_of_range, flat_ranges_of
from lowtide.checkpoint.dcp import STEP
from lowtide.checkpoint.export import ExportFolder
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.checkpoint.safetensors_files import SafetensorsSource, WeightsPlan
from lowtide.checkpoint.writer import write_part
from lowtide.offload.tensor_chunk import TensorChunk
from tests.checkpoint.making import NO_OPTIMIZER, manifest_of

NO_LIMIT = 1 << 62


def elements_of(chunk: TensorChunk, shape: tuple[int, ...]) -> list[int]:
    """The places of a chunk's elements in the flattened tensor, by torch."""
    found: list[int] = torch.arange(math.prod(shape)).view(shape)[chunk.index].reshape(-1).tolist()
    return found


def random_ranges(count: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(shape, start, end), with no dimensions, dimensions of 1 and empty ranges among them."""
    draw = random.Random(7)
    for _ in range(count):
        shape = tuple(draw.choice((1, 1, 2, 3, 4, 5)) for _ in range(draw.randint(0, 5)))
        start, end = sorted(draw.randint(0, math.prod(shape)) for _ in range(2))
        yield shape, start, end


@pytest.mark.parametrize("max_numel", [1, 3, 16, NO_LIMIT])
def test_chunks_cover_a_range_in_order_and_each_is_contiguous(max_numel: int) -> None:
    for shape, start, end in random_ranges(150):
        covered = []
        for chunk in chunks_of_range(shape, start, end, max_numel):
            elements = elements_of(chunk, shape)
            assert elements == list(range(chunk.start_in(shape), chunk.start_in(shape) + chunk.numel)), (shape, chunk)
            assert 0 < chunk.numel <= max_numel, (shape, start, end, chunk)
            covered += elements
        assert covered == list(range(start, end)), (shape, start, end)


def test_chunks_are_few() -> None:
    for shape, start, end in random_ranges(500):
        count = len(chunks_of_range(shape, start, end, NO_LIMIT))
        assert count <= max(1, 2 * len(shape) - 1), (shape, start, end)
    for num_dims in range(1, 6):  # so many are really needed: all but the first and the last element
        assert len(chunks_of_range((3,) * num_dims, 1, 3**num_dims - 1, NO_LIMIT)) == 2 * num_dims - 1
    # Large chunks are cut along their first long dimension.
    assert chunks_of_range((1, 6, 4), 0, 24, 8) == [TensorChunk((0, row, 0), (1, 2, 4)) for row in (0, 2, 4)]
    assert chunks_of_range((2, 10), 0, 20, 4) == [
        TensorChunk((row, column), (1, size)) for row in (0, 1) for column, size in ((0, 4), (4, 4), (8, 2))
    ]


SHAPE = (4, 6, 5)
CUTS: dict[str, tuple[Sequence[int], ...]] = {  # where each dimension is cut
    "whole": ((), (), ()),
    "experts": ((1, 2, 3), (), ()),
    "rows": ((), (2,), ()),
    "columns": ((), (), (2, 3)),
    "uneven": ((3,), (1, 4), (4,)),
}


def chunks_at(cuts: Sequence[Sequence[int]]) -> list[TensorChunk]:
    """The chunks that the cuts divide a tensor of SHAPE into."""
    sides = []
    for size, places in zip(SHAPE, cuts, strict=True):
        edges = (0, *places, size)
        sides.append([(low, high - low) for low, high in itertools.pairwise(edges)])
    return [TensorChunk(*map(tuple, zip(*sides_of_chunk, strict=True))) for sides_of_chunk in itertools.product(*sides)]


def shards(cuts: Sequence[Sequence[int]], value: Tensor, count: int) -> Iterator[ChunkView]:
    """Ranges of the chunks, as ranks that share each of them have it: copies of its values."""
    for chunk in chunks_at(cuts):
        flat = value[chunk.index].flatten().contiguous()
        edges = [flat.numel() * part // count for part in range(count + 1)]
        for low, high in itertools.pairwise(edges):
            yield ChunkView("model.w", SHAPE, low, flat[low:high].clone(), chunk)


@pytest.mark.parametrize("written", CUTS)
def test_every_split_reads_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setattr(writer, "MAX_VALUES_BYTES", 32)  # many chunks in a small tensor
    value = torch.randn(SHAPE)
    target = CheckpointFolder(tmp_path)
    saving = target.begin("a")
    chunk_views = [*shards(CUTS[written], value, 3), ChunkView(STEP, (), 0, torch.ones(1))]
    for rank, one in enumerate(chunk_views):
        write_part(saving, rank, [one], [], {})
    target.commit(manifest_of({"w": value}, "a", len(chunk_views)), NO_OPTIMIZER, None)
    source = target.open().weights
    for cuts, (count, dtype) in itertools.product(CUTS.values(), ((1, torch.float64), (7, torch.float32))):
        found = list(shards(cuts, value, count))
        wanted = [
            dataclasses.replace(one, name="w", memory=torch.full_like(one.values, torch.nan, dtype=dtype))
            for one in found
        ]
        source.read(wanted)
        for one, expected in zip(wanted, found, strict=True):
            assert torch.equal(one.values, expected.values.to(dtype)), (written, one.chunk, one.start)


def test_splits_are_written_to_and_read_from_safetensors(tmp_path: Path) -> None:
    value, dtype = torch.randn(SHAPE), torch.bfloat16
    for name, cuts in CUTS.items():
        folder = ExportFolder(tmp_path / name, WeightsPlan.of({"model.w": TensorInfo(SHAPE, dtype)}, 1 << 20))
        folder.create({})
        written: list[int] = []
        folder.write(shards(cuts, value, 2), written.append)
        folder.publish()
        assert sum(written) == value.numel() * dtype.itemsize
        source = SafetensorsSource(tmp_path / name)
        for other in CUTS.values():
            for one in shards(other, value.to(dtype), 3):
                found = dataclasses.replace(one, memory=torch.full_like(one.values, torch.nan))
                source.read([found])
                assert torch.equal(found.values, one.values), (name, one.chunk)


def test_flat_ranges_are_the_elements_of_a_chunk_and_as_few_as_can_be() -> None:
    for chunk in (chunk for cuts in CUTS.values() for chunk in chunks_at(cuts)):
        found = list(flat_ranges_of(chunk, SHAPE))
        assert [number for low, high in found for number in range(low, high)] == elements_of(chunk, SHAPE)
        assert all(high < low for (_, high), (low, _) in itertools.pairwise(found))
    assert list(flat_ranges_of(TensorChunk((), ()), ())) == [(0, 1)]
