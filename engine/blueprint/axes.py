"""The axes of a training: names, order, and the axes that divide each kind of tensor."""

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
    """Return the axes, outermost first. Axes with the most communication are innermost, between neighbouring ranks.

        pipe > replica > secondary > shard > expert > sequence > tensor

    Ranks of a pipeline place are data-parallel, in shard groups. With hpZ each coordinate of "secondary" is a group
    that holds all parameters. With experts the ranks of "expert" together hold all experts, and are data-parallel for
    all other parameters.

    ranks_of_level: neighbouring ranks of a host that sum gradients first. These groups become coordinates of
    "secondary" if they can, or the groups of hpZ are used.
    """
    data_size = num_ranks // parallel.ranks_of_sample
    states_size = policy.shard_size(data_size, zero.shard_size)
    group_size = zero.partition_size if zero.partition_size > 1 else states_size
    # A host's ranks include those that share a sample. Only its data-parallel ranks form a level.
    level_size, rest = divmod(ranks_of_level or 0, parallel.sequence * parallel.tensor)
    if zero.partition_size == 1 and policy.shards_states and level_size and not rest:
        # A level must divide the shard group, and hold all experts: the expert axis lies inside.
        group_size = states_size if states_size % level_size or level_size % parallel.expert else level_size
    # Before the experts are taken out: "secondary" counts whole groups.
    whole_size = group_size
    num_groups = data_size // states_size
    # The ranks of "expert" are data-parallel too: a part of the shard group, or of the replicas if nothing is sharded.
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
    """Return the sharding spec of parameters that are replicated on a pipeline place, apart from tensor splits.

    holds_all: each "secondary" group holds all parameters at rest (hpZ). in_levels: gradients are summed over such a
    group first, then over all groups.
    """
    group = (SHARD, EXPERT, SEQUENCE)
    # The first axis divides first. With hpZ the parameters at rest are divided over `group` alone, so it comes first.
    states = (*group, SECONDARY) if holds_all else (SECONDARY, *group)
    return ShardingSpec(
        states=states if policy.shards_states else (),
        parameters=() if not policy.frees_parameters else group if holds_all else states,
        summed=parallel_dims.summed,
        last=(SECONDARY,) if in_levels and policy.shards_states else (),
    )
