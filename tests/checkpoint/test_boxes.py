"""Boxes of a range: they cover it exactly and in order, each in one stretch, and they are few."""

import math
import random

import pytest
import torch

from lowtide.checkpoint.chunk_view import chunks_of_range
from lowtide.offload.tensor_chunk import TensorChunk

NO_LIMIT = 1 << 62


def elements_of(chunk: TensorChunk, shape: tuple[int, ...]) -> list[int]:
    """The places of a box's elements in the flattened tensor, by torch."""
    numbered = torch.arange(math.prod(shape)).view(shape)
    index = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return [int(number) for number in numbered[index].reshape(-1)]


def random_cases(count: int, max_dims: int) -> list[tuple[tuple[int, ...], int, int]]:
    """(shape, start, end) with dimensions of 1 among them."""
    draw = random.Random(7)
    cases = []
    for _ in range(count):
        shape = tuple(draw.choice((1, 1, 2, 3, 4, 5)) for _ in range(draw.randint(0, max_dims)))
        start, end = sorted(draw.randint(0, math.prod(shape)) for _ in range(2))
        cases.append((shape, start, end))
    return cases


@pytest.mark.parametrize("max_numel", [1, 2, 3, 7, 16, NO_LIMIT])
def test_boxes_cover_a_range_exactly_in_order_and_in_one_stretch_each(max_numel: int) -> None:
    for shape, start, end in random_cases(400, 5):
        chunks = chunks_of_range(shape, start, end, max_numel)
        covered = []
        for chunk in chunks:
            elements = elements_of(chunk, shape)
            assert elements == list(range(chunk.start_in(shape), chunk.start_in(shape) + chunk.numel)), (shape, chunk)
            assert 0 < chunk.numel <= max_numel, (shape, start, end, chunk)
            covered += elements
        assert covered == list(range(start, end)), (shape, start, end)


def test_a_range_is_at_most_two_boxes_less_one_for_each_dimension() -> None:
    for shape, start, end in random_cases(2000, 5):
        count = len(chunks_of_range(shape, start, end, NO_LIMIT))
        assert count <= max(1, 2 * len(shape) - 1), (shape, start, end)
    for num_dims in range(1, 6):  # so many are really needed: all but the first and the last element
        assert len(chunks_of_range((3,) * num_dims, 1, 3**num_dims - 1, NO_LIMIT)) == 2 * num_dims - 1


def test_the_drawing_of_the_module() -> None:
    chunks = chunks_of_range((4, 5), 3, 18, NO_LIMIT)
    assert chunks == [TensorChunk((0, 3), (1, 2)), TensorChunk((1, 0), (2, 5)), TensorChunk((3, 0), (1, 3))]


def test_a_tensor_without_dimensions_is_one_box() -> None:
    assert chunks_of_range((), 0, 1, 1) == [TensorChunk((), ())]
    assert TensorChunk((), ()).numel == 1 and TensorChunk((), ()).start_in(()) == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 4)])
def test_an_empty_range_has_no_box(shape: tuple[int, ...]) -> None:
    assert chunks_of_range(shape, 0, 0, 8) == []


def test_large_boxes_are_cut_along_their_first_long_dimension() -> None:
    assert chunks_of_range((1, 6, 4), 0, 24, 8) == [TensorChunk((0, row, 0), (1, 2, 4)) for row in (0, 2, 4)]
    assert chunks_of_range((2, 10), 0, 20, 4) == [
        TensorChunk((row, column), (1, size)) for row in (0, 1) for column, size in ((0, 4), (4, 4), (8, 2))
    ]
