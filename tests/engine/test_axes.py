"""The axes of a training: which ranks differ on which, and over which of them what is divided, summed and copied."""

from math import prod
from typing import Any

import pytest

from lowtide.comm import Mesh, ParallelDims, World
from lowtide.engine.blueprint.axes import TENSOR, domain_of, parallel_dims_of
from lowtide.engine.config.parallel import ParallelConfig, world_faults
from lowtide.engine.config.zero import ZeroConfig
from lowtide.zero.policy import ZeroPolicy
from lowtide.zero.sharding_spec import ShardingSpec
from tests.kit.ranks import RankPool


def axes_of(num_ranks: int, stage: int, degrees: dict[str, int], **zero: Any) -> tuple[ParallelDims, ShardingSpec]:
    policy = ZeroPolicy.from_stage(stage)
    config = ZeroConfig.model_validate({"stage": stage, **zero})
    arrangement = parallel_dims_of(ParallelConfig.model_validate(degrees), config, policy, num_ranks)
    return arrangement, domain_of(policy, arrangement)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("zero", [{}, {"shard_size": 2}], ids=str)
@pytest.mark.parametrize(
    "degrees", [{}, {"tensor": 2}, {"sequence": 2}, {"expert": 2}, {"pipeline": 2, "tensor": 2, "sequence": 2}], ids=str
)
def test_the_axes_have_all_ranks(stage: int, zero: dict[str, int], degrees: dict[str, int]) -> None:
    arrangement, domain = axes_of(16, stage, degrees, **(zero if stage else {}))
    assert arrangement.num_ranks == 16
    assert arrangement.size(arrangement.data) == 16 // prod(degrees.get(key, 1) for key in ("pipeline", *SPLITS))
    assert arrangement.size((*domain.states, *domain.replicas)) == arrangement.size(domain.summed)
    assert set(domain.summed) == {*arrangement.data, *arrangement.parts} and TENSOR not in domain.states
    assert domain.states[: len(domain.parameters)] == domain.parameters


SPLITS = ("tensor", "sequence")


def test_ranks_that_exchange_most_are_next_to_each_other() -> None:
    arrangement, domain = axes_of(16, 3, {"pipeline": 2, "tensor": 2, "sequence": 2})
    assert arrangement.ranks(5, ("tensor",)) == (4, 5)
    assert arrangement.ranks(5, ("sequence",)) == (5, 7)
    assert arrangement.ranks(5, arrangement.data) == (1, 5)
    assert arrangement.ranks(5, domain.states) == (1, 3, 5, 7), "states are divided over parts of sequences too"
    assert arrangement.ranks(5, ("pipe",)) == (5, 13)


def test_experts_lie_on_data_parallel_ranks() -> None:
    arrangement, domain = axes_of(8, 3, {"expert": 2}, shard_size=4)
    assert dict(arrangement.sizes) == {**ONE, "replica": 2, "shard": 2, "expert": 2}
    assert arrangement.size(domain.states) == 4 and arrangement.size(arrangement.data) == 8
    arrangement, domain = axes_of(8, 0, {"expert": 2})
    assert dict(arrangement.sizes) == {**ONE, "replica": 4, "expert": 2} and not domain.states


ONE = dict.fromkeys(("pipe", "replica", "secondary", "shard", "expert", "sequence", "tensor"), 1)


@pytest.mark.parametrize(
    ("degrees", "num_ranks", "text"),
    [
        ({"tensor": 3}, 8, "tensor(3) x data(?) = world size (8) does not hold; the nearest legal values are 2 or 4"),
        (
            {"pipeline": 2, "sequence": 3},
            8,
            "pipeline(2) x sequence(3) x data(?) = world size (8) does not hold; the nearest legal values are 2 or 4",
        ),
        (
            {"tensor": 2, "expert": 3},
            8,
            "expert(3) x groups(?) = data-parallel ranks(4) does not hold; the nearest legal values are 2 or 4",
        ),
    ],
)
def test_degrees_that_do_not_divide_give_the_equation(degrees: dict[str, int], num_ranks: int, text: str) -> None:
    (fault,) = world_faults(ParallelConfig.model_validate(degrees), num_ranks)
    assert text in fault.message and fault.path == f"parallel.{[*degrees][-1]}"


def what_a_rank_is() -> tuple[int, int, bool, bool, bool]:
    arrangement, domain = axes_of(8, 3, {"pipeline": 2, "sequence": 2, "tensor": 2})
    mesh = Mesh.create(World.join("cpu", 20.0), arrangement, "auto", 1 << 20, "pipe", domain.folds)
    return mesh.data_rank, mesh.over(domain.states).size, mesh.is_first, mesh.speaks, mesh.has_whole


def test_a_mesh_says_who_tells_of_what(ranks: RankPool) -> None:
    found = ranks(8, what_a_rank_is)
    assert {(one[0], one[1], one[4]) for one in found} == {(0, 2, False)}
    assert [one[2] for one in found] == [True, False, False, False] * 2
    assert [one[3] for one in found] == [True, False] * 4
