"""The flat layout: every element of every parameter lies in exactly one shard."""

import math
import random
from itertools import pairwise

from lowtide.offload import round_up
from lowtide.zero.layout import BLOCK_NUMEL, PARAM_ALIGNMENT_NUMEL, FlatLayout

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (16,), (17,), (5, 123, 123), (1024,), (1023, 3), (2, 3, 5, 7), (4096,)]
CHANCE = random.Random(0)
CASES = [
    ([(f"p{i}", CHANCE.choice(SHAPES)) for i in range(CHANCE.randint(1, 9))], CHANCE.choice([1, 2, 3, 4, 7, 64]))
    for _ in range(200)
] + [([("a", (0,)), ("b", (4, 0))], 4)]
LAYOUTS = [(FlatLayout.of(shapes, shard_count), shapes, shard_count) for shapes, shard_count in CASES]


def test_every_element_lies_in_exactly_one_shard() -> None:
    for layout, _, shard_count in LAYOUTS:
        shards = [(rank, shard) for rank in range(shard_count) for shard in layout.param_shards(rank)]
        for index, view in enumerate(layout.param_views):
            covered = sorted((s.offset_in_param, s.offset_in_param + s.numel) for _, s in shards if s.index == index)
            ends = [0, *(end for _, end in covered)]
            assert [start for start, _ in covered] == ends[:-1] and ends[-1] == view.numel
        for rank, shard in shards:
            place = rank * layout.shard_numel + shard.offset_in_shard
            assert place == layout.param_views[shard.index].offset_in_flat + shard.offset_in_param
            assert 0 <= shard.offset_in_shard < shard.offset_in_shard + shard.numel <= layout.shard_numel


def test_parameters_are_aligned_and_lie_there_at_any_number_of_shards() -> None:
    for layout, shapes, _ in LAYOUTS:
        end = 0
        for view, (name, shape) in zip(layout.param_views, shapes, strict=True):
            assert (view.name, view.shape, view.numel) == (name, shape, math.prod(shape))
            assert view.offset_in_flat == round_up(end, PARAM_ALIGNMENT_NUMEL)
            end = view.end_in_flat
        assert layout.numel == sum(math.prod(shape) for _, shape in shapes)
        assert layout.param_views == FlatLayout.of(shapes, 1).param_views


def test_shards_are_whole_blocks_and_as_small_as_possible() -> None:
    for layout, shapes, shard_count in LAYOUTS:
        used = sum(round_up(math.prod(shape), PARAM_ALIGNMENT_NUMEL) for _, shape in shapes)
        assert layout.shard_numel % BLOCK_NUMEL == 0
        assert layout.padded_numel == shard_count * layout.shard_numel >= used
        assert layout.padded_numel - used < shard_count * BLOCK_NUMEL if used else layout.padded_numel == 0


def test_each_element_and_the_padding_behind_it_belongs_to_a_parameter() -> None:
    chance = random.Random(1)
    for layout, _, _ in LAYOUTS:
        full = [view for view in layout.param_views if view.numel]
        for view in full:
            for offset in {0, view.numel - 1, chance.randrange(view.numel)}:
                assert layout.param_view_at(view.offset_in_flat + offset) is view
        for view, following in pairwise(full):
            for padding in range(view.end_in_flat, following.offset_in_flat):
                assert layout.param_view_at(padding) is view
        if full:
            assert layout.param_view_at(layout.padded_numel - 1) is full[-1]


def test_round_up_gives_the_smallest_multiple() -> None:
    assert [round_up(value, 16) for value in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
