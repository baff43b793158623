"""Objects of all ranks: what each says is what all hear, however long it is."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowtide.comm.world import gather_objects
from tests.kit.ranks import RankPool


def everyone_says(lengths: list[int]) -> tuple[list[Any], int]:
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as collective:
        heard = gather_objects({dist.get_rank(): b"x" * lengths[dist.get_rank()]})
    return [(rank, len(said)) for one in heard for rank, said in one.items()], collective.call_count


@pytest.mark.parametrize(("lengths", "collectives"), [([0, 100, 7], 1), ([3, 200, 1000], 2), ([9000, 1, 300], 2)])
def test_every_rank_hears_what_each_says(ranks: RankPool, lengths: list[int], collectives: int) -> None:
    assert ranks(3, everyone_says, lengths) == [(list(enumerate(lengths)), collectives)] * 3


def says_at_the_edge() -> list[tuple[int, int]]:
    return [(length, len(gather_objects(b"x" * length)[1])) for length in range(225, 240)]


def test_no_length_at_the_edge_is_cut_off(ranks: RankPool) -> None:
    assert ranks(2, says_at_the_edge)[0] == [(length, length) for length in range(225, 240)]
