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
        pieces = [(rank, piece) for rank in range(shard_count) for piece in layout.pieces(rank)]
        for index, slot in enumerate(layout.slots):
            covered = [
                (piece.offset_in_param, piece.offset_in_param + piece.numel)
                for _, piece in pieces
                if piece.index == index
            ]
            assert sum(end - start for start, end in covered) == slot.numel
            ends = [0, *(end for _, end in sorted(covered))]
            assert [start for start, _ in sorted(covered)] == ends[:-1]
        for rank, piece in pieces:
            place = rank * layout.shard_numel + piece.offset_in_shard
            assert place == layout.slots[piece.index].offset_in_flat + piece.offset_in_param
            assert 0 <= piece.offset_in_shard < piece.offset_in_shard + piece.numel <= layout.shard_numel


def test_parameters_are_aligned_and_do_not_overlap() -> None:
    for shapes, shard_count in cases():
        layout = FlatLayout.of(shapes, shard_count)
        end = 0
        for slot, (name, shape) in zip(layout.slots, shapes, strict=True):
            assert (slot.name, slot.shape, slot.numel) == (name, shape, math.prod(shape))
            assert slot.offset_in_flat % PARAM_ALIGNMENT_NUMEL == 0
            assert end <= slot.offset_in_flat < end + PARAM_ALIGNMENT_NUMEL
            end = slot.end_in_flat
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
        assert FlatLayout.of(shapes, shard_count).slots == FlatLayout.of(shapes, 1).slots


def test_slot_at_gives_the_parameter_that_holds_the_element() -> None:
    generator = random.Random(1)
    for shapes, shard_count in cases():
        layout = FlatLayout.of(shapes, shard_count)
        full = [slot for slot in layout.slots if slot.numel]
        for slot in full:
            for offset in {0, slot.numel - 1, generator.randrange(slot.numel)}:
                assert layout.slot_at(slot.offset_in_flat + offset) is slot
        for slot, following in pairwise(full):
            for padding in range(slot.end_in_flat, following.offset_in_flat):
                assert layout.slot_at(padding) is slot
        if full:
            assert layout.slot_at(layout.padded_numel - 1) is full[-1]


def test_a_group_of_empty_parameters_takes_no_room() -> None:
    layout = FlatLayout.of([("a", (0,)), ("b", (4, 0))], 4)
    assert (layout.shard_numel, layout.padded_numel, layout.numel) == (0, 0, 0)
    assert not any(layout.pieces(rank) for rank in range(4))


def test_a_scalar_parameter_takes_one_block_on_one_shard() -> None:
    layout = FlatLayout.of([("scale", ())], 2)
    assert layout.shard_numel == 1024 and [len(layout.pieces(rank)) for rank in range(2)] == [1, 0]


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32)])
def test_round_up_gives_the_smallest_multiple(value: int, expected: int) -> None:
    assert round_up(value, 16) == expected
