"""Places of ranks on named axes: each rank has one of its own, and an axis is a line through it."""

import pytest

from lowtide.comm import Mesh, ParallelDims, World

EIGHT = ParallelDims((("pipe", 2), ("replica", 2), ("shard", 2)), data=("replica", "shard"))
UNEVEN = ParallelDims((("a", 2), ("b", 1), ("c", 3), ("d", 2)), data=("c", "d"))


def test_the_last_axis_is_the_fastest() -> None:
    assert [EIGHT.ranks(5, (name,)) for name in ("pipe", "replica", "shard")] == [(1, 5), (5, 7), (4, 5)]
    assert EIGHT.ranks(6, EIGHT.data) == (4, 5, 6, 7) and EIGHT.place(6, EIGHT.data) == 2
    assert EIGHT.ranks(6, ("shard", "replica")) == (4, 6, 5, 7), "the order of the names is that of the places"
    assert EIGHT.ranks(6, ()) == (6,) and EIGHT.place(6, ()) == 0 and EIGHT.size(()) == 1


@pytest.mark.parametrize("parallel_dims", [EIGHT, UNEVEN], ids=str)
def test_ranks_and_places_belong_together(parallel_dims: ParallelDims) -> None:
    names = [name for name, _ in parallel_dims.sizes]
    for axes in ((), *((name,) for name in names), names[1:], names[::-1], (names[-1], names[0])):
        for rank in range(parallel_dims.num_ranks):
            line = parallel_dims.ranks(rank, axes)
            assert line[parallel_dims.place(rank, axes)] == rank
            assert len(set(line)) == len(line) == parallel_dims.size(axes)
            assert all(parallel_dims.ranks(other, axes) == line for other in line)
    assert parallel_dims.ranks(0, names) == tuple(range(parallel_dims.num_ranks))


def test_an_arrangement_is_of_all_ranks() -> None:
    world = World.join("cpu", 30.0)
    try:
        with pytest.raises(ValueError, match=r"pipe\(2\) x replica\(2\) x shard\(2\) = 8 != world size \(1\)"):
            Mesh.create(world, EIGHT, "auto", 0, "pipe")
    finally:
        world.leave()
