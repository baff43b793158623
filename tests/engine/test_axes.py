"""The axes of a training: which ranks differ on which, and over which of them what is divided, summed and copied."""

from math import prod
from typing import Any

import pytest

from lowtide.comm import Mesh, ParallelDims, World
from lowtide.engine.blueprint.axes import TENSOR, parallel_dims_of, sharding_of
from lowtide.engine.config.parallel import ParallelConfig
from lowtide.engine.config.zero import ZeroConfig
from lowtide.zero.policy import ZeroPolicy
from lowtide.zero.sharding_spec import ShardingSpec
from tests.kit.ranks import RankPool

ONE = dict.fromkeys(("pipe", "replica", "secondary", "shard", "expert", "sequence", "tensor"), 1)


def axes_of(num_ranks: int, stage: int, degrees: dict[str, int], **zero: Any) -> tuple[ParallelDims, ShardingSpec]:
    policy = ZeroPolicy.from_stage(stage)
    config = ZeroConfig.model_validate({"stage": stage, **zero})
    parallel_dims = parallel_dims_of(ParallelConfig.model_validate(degrees), config, policy, num_ranks)
    return parallel_dims, sharding_of(policy, parallel_dims)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("zero", [{}, {"shard_size": 2}], ids=str)
@pytest.mark.parametrize(
    "degrees", [{}, {"tensor": 2}, {"sequence": 2}, {"expert": 2}, {"pipeline": 2, "tensor": 2, "sequence": 2}], ids=str
)
def test_the_axes_have_all_ranks(stage: int, zero: dict[str, int], degrees: dict[str, int]) -> None:
    parallel_dims, sharding = axes_of(16, stage, degrees, **(zero if stage else {}))
    assert parallel_dims.num_ranks == 16
    assert parallel_dims.size(parallel_dims.data) == 16 // prod(
        degrees.get(key, 1) for key in ("pipeline", "tensor", "sequence")
    )
    assert parallel_dims.size((*sharding.states, *sharding.replicas)) == parallel_dims.size(sharding.summed)
    assert set(sharding.summed) == {*parallel_dims.data, *parallel_dims.parts} and TENSOR not in sharding.states
    assert sharding.states[: len(sharding.parameters)] == sharding.parameters


def test_ranks_that_exchange_most_are_next_to_each_other() -> None:
    parallel_dims, sharding = axes_of(16, 3, {"pipeline": 2, "tensor": 2, "sequence": 2})
    assert parallel_dims.ranks(5, ("tensor",)) == (4, 5)
    assert parallel_dims.ranks(5, ("sequence",)) == (5, 7)
    assert parallel_dims.ranks(5, parallel_dims.data) == (1, 5)
    assert parallel_dims.ranks(5, sharding.states) == (1, 3, 5, 7), "states are divided over parts of sequences too"
    assert parallel_dims.ranks(5, ("pipe",)) == (5, 13)


def test_experts_lie_on_data_parallel_ranks() -> None:
    parallel_dims, sharding = axes_of(8, 3, {"expert": 2}, shard_size=4)
    assert dict(parallel_dims.sizes) == {**ONE, "replica": 2, "shard": 2, "expert": 2}
    assert parallel_dims.size(sharding.states) == 4 and parallel_dims.size(parallel_dims.data) == 8
    parallel_dims, sharding = axes_of(8, 0, {"expert": 2})
    assert dict(parallel_dims.sizes) == {**ONE, "replica": 4, "expert": 2} and not sharding.states


def what_a_rank_is() -> tuple[int, int, bool, bool, bool]:
    parallel_dims, sharding = axes_of(8, 3, {"pipeline": 2, "sequence": 2, "tensor": 2})
    mesh = Mesh.create(World.join("cpu", 20.0), parallel_dims, "auto", 1 << 20, "pipe", sharding.folds)
    return mesh.data_rank, mesh.over(sharding.states).size, mesh.is_first, mesh.speaks, mesh.has_whole


def test_a_mesh_says_who_tells_of_what(ranks: RankPool) -> None:
    found = ranks(8, what_a_rank_is)
    assert {(one[0], one[1], one[4]) for one in found} == {(0, 2, False)}
    assert [one[2] for one in found] == [True, False, False, False] * 2
    assert [one[3] for one in found] == [True, False] * 4
