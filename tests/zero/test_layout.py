"""The flat layout: every element of every parameter lies in exactly one shard."""

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lowtide.zero.layout import BLOCK_NUMEL, PARAM_ALIGNMENT_NUMEL, FlatLayout, round_up

Shapes = list[tuple[str, tuple[int, ...]]]

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (16,), (17,), (5, 123, 123), (1024,), (1023, 3), (2, 3, 5, 7), (4096,)]


def cases() -> Iterator[tuple[Shapes, int]]:
    generator = random.Random(0)
    for _ in range(200):
        shapes = [(f"p{i}", generator.choice(SHAPES)) for i in range(generator.randint(1, 9))]
        yield shapes, generator.choice([1, 2, 3, 4, 7, 64])


def test_every_element_lies_in_exactly_one_shard() -> None:
    for shapes, shard_count in cases():
        layout = FlatLayout.of(shapes, shard_count)
        param_shards = [(rank, param_shard) for rank in range(shard_count) for param_shard in layout.param_shards(rank)]
        for index, param_view in enumerate(layout.param_views):
            covered = [
                (param_shard.offset_in_param, param_shard.offset_in_param + param_shard.numel)
                for _, param_shard in param_shards
                if param_shard.index == index
            ]
            assert sum(end - start for start, end in covered) == param_view.numel
            ends = [0, *(end for _, end in sorted(covered))]
            assert [start for start, _ in sorted(covered)] == ends[:-1]
        for rank, param_shard in param_shards:
            place = rank * layout.shard_numel + param_shard.offset_in_shard
            assert place == layout.param_views[param_shard.index].offset_in_flat + param_shard.offset_in_param
            assert (
                0 <= param_shard.offset_in_shard < param_shard.offset_in_shard + param_shard.numel <= layout.shard_numel
            )


def test_parameters_are_aligned_and_do_not_overlap() -> None:
    for shapes, shard_count in cases():
        layout = FlatLayout.of(shapes, shard_count)
        end = 0
        for param_view, (name, shape) in zip(layout.param_views, shapes, strict=True):
            assert (param_view.name, param_view.shape, param_view.numel) == (name, shape, math.prod(shape))
            assert param_view.offset_in_flat % PARAM_ALIGNMENT_NUMEL == 0
            assert end <= param_view.offset_in_flat < end + PARAM_ALIGNMENT_NUMEL
            end = param_view.end_in_flat
        assert layout.numel == sum(math.prod(shape) for _, shape in shapes)


def test_shards_are_whole_blocks_and_as_small_as_possible() -> None:
    for shapes, shard_count in cases():
        layout = FlatLayout.of(shapes, shard_count)
        used = sum(round_up(math.prod(shape), PARAM_ALIGNMENT_NUMEL) for _, shape in shapes)
        assert layout.shard_numel % BLOCK_NUMEL == 0
        assert layout.padded_numel == shard_count * layout.shard_numel >= used
        assert layout.padded_numel - used < shard_count * BLOCK_NUMEL or used == 0


def test_offsets_in_the_flat_buffer_do_not_depend_on_the_number_of_shards() -> None:
    for shapes, shard_count in cases():
        assert FlatLayout.of(shapes, shard_count).param_views == FlatLayout.of(shapes, 1).param_views


def test_slot_at_gives_the_parameter_that_holds_the_element() -> None:
    generator = random.Random(1)
    for shapes, shard_count in cases():
        layout = FlatLayout.of(shapes, shard_count)
        full = [param_view for param_view in layout.param_views if param_view.numel]
        for param_view in full:
            for offset in {0, param_view.numel - 1, generator.randrange(param_view.numel)}:
                assert layout.param_view_at(param_view.offset_in_flat + offset) is param_view
        for param_view, following in pairwise(full):
            for padding in range(param_view.end_in_flat, following.offset_in_flat):
                assert layout.param_view_at(padding) is param_view
        if full:
            assert layout.param_view_at(layout.padded_numel - 1) is full[-1]


def test_a_group_of_empty_parameters_takes_no_room() -> None:
    layout = FlatLayout.of([("a", (0,)), ("b", (4, 0))], 4)
    assert (layout.shard_numel, layout.padded_numel, layout.numel) == (0, 0, 0)
    assert not any(layout.param_shards(rank) for rank in range(4))


def test_a_scalar_parameter_takes_one_block_on_one_shard() -> None:
    layout = FlatLayout.of([("scale", ())], 2)
    assert layout.shard_numel == 1024 and [len(layout.param_shards(rank)) for rank in range(2)] == [1, 0]


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32)])
def test_round_up_gives_the_smallest_multiple(value: int, expected: int) -> None:
    assert round_up(value, 16) == expected
