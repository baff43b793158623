"""The axes of a training: their names, their order, and what is divided over which."""

from __future__ import annotations

from ...comm import ParallelDims
from ...zero.policy import ZeroPolicy
from ...zero.sharding_spec import ShardingSpec
from ..config.parallel import ParallelConfig
from ..config.zero import ZeroConfig

PIPE, REPLICA, SECONDARY, SHARD, EXPERT, SEQUENCE, TENSOR = (
    "pipe",
    "replica",
    "secondary",
    "shard",
    "expert",
    "sequence",
    "tensor",
)


def parallel_dims_of(
    parallel: ParallelConfig, zero: ZeroConfig, policy: ZeroPolicy, num_ranks: int, ranks_of_level: int | None = None
) -> ParallelDims:
    """The axes of the job, outermost first: what is exchanged most often, between ranks that are next to each other.

        pipe > replica > secondary > shard > expert > sequence > tensor

    The ranks of a pipeline place are data-parallel, in groups that shard. Such a group may consist of several that hold
    all parameters each, the places of "secondary"; and, in a model with experts, of several that hold all experts,
    whose ranks are "expert": data-parallel to each other like those of "shard", for all but experts.

    ranks_of_level: ranks next to each other, of one host, over which gradients are summed before they are over others;
    such groups are the places of "secondary" too, where they can be, and those of hpZ where there are some.
    """
    data_size = num_ranks // parallel.ranks_of_sample
    states_size = policy.shard_size(data_size, zero.shard_size)
    group_size = zero.partition_size if zero.partition_size > 1 else states_size
    level_size, rest = divmod(ranks_of_level or 0, parallel.sequence * parallel.tensor)
    if zero.partition_size == 1 and policy.shards_states and level_size and not rest:
        group_size = states_size if states_size % level_size or level_size % parallel.expert else level_size
    whole_size = group_size
    num_groups = data_size // states_size
    if policy.shards_states:
        group_size //= parallel.expert
    else:
        num_groups //= parallel.expert
    sizes = (
        (PIPE, parallel.pipeline),
        (REPLICA, num_groups),
        (SECONDARY, states_size // whole_size),
        (SHARD, group_size),
        (EXPERT, parallel.expert),
        (SEQUENCE, parallel.sequence),
        (TENSOR, parallel.tensor),
    )
    return ParallelDims(sizes, data=(REPLICA, SECONDARY, SHARD, EXPERT), parts=(SEQUENCE,), layers=(TENSOR,))


def sharding_of(
    policy: ZeroPolicy, parallel_dims: ParallelDims, holds_all: bool = True, in_levels: bool = False
) -> ShardingSpec:
    """Of parameters that are alike on all ranks of a pipeline place, but for what a tensor axis splits of them.

    holds_all: each place of "secondary" has all parameters at rest, where there are several: hpZ. in_levels: gradients
    are summed over such a place before they are over all of them.
    """
    group = (SHARD, EXPERT, SEQUENCE)
    states = (*group, SECONDARY) if holds_all else (SECONDARY, *group)
    return ShardingSpec(
        states=states if policy.shards_states else (),
        parameters=() if not policy.frees_parameters else group if holds_all else states,
        summed=parallel_dims.summed,
        last=(SECONDARY,) if in_levels and policy.shards_states else (),
    )
