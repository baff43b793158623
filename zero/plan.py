"""Plans the units of a model and the layouts of their groups, before memory is taken.

A unit is gathered, reduced and released together. The root unit holds the parameters outside of all blocks.

[Note: large ends] The root unit is gathered before the first block and stays while the model runs. Its gradient is
reduced after the backward, with nothing to overlap. A vocabulary of 128,000 makes it larger than a block. So a large
embedding or head is a unit of its own, if the order of registration, in which units are gathered, is the order of use:
an embedding is used before the blocks, a linear layer outside of them after. A tied weight is used twice, and stays in
the root unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..comm import ParallelDims
from ..model.blocks import MIN_SHARE_OF_PARAMETERS, find_blocks, numel, running_modules
from ..offload import TensorShard
from .layout import FlatLayout
from .sharding_spec import Replicas, ShardingSpec

ROOT = "(root)"

_MIN_END_NUMEL = 1 << 20  # a message below a few MiB is bound by latency


@dataclass(frozen=True)
class UnitPlan:
    """A unit: a module, and the parameters that only it uses. The root unit has all remaining parameters."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    copies: tuple[Replicas, ...] = ()
    is_end: bool = False  # a large embedding or head, and no block

    @property
    def is_root(self) -> bool:
        return self.name == ROOT


def plan_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[UnitPlan]:
    """Return the units in the order of registration, the root unit first.

    Without patterns a unit is an element of an outermost `ModuleList` or `Sequential` whose elements repeat a class and
    hold a good part of the model, or a large embedding before these elements, or a large linear layer after them.
    patterns: shell-style patterns of module names; each match is a unit. For a container its running modules are units:
    see [Note: what runs] in `blocks.py`. A parameter that several units use belongs to the root unit, under its first
    name.

    Raises ValueError if a pattern matches no module or no module that runs, or if units contain each other.
    """
    blocks = _named_blocks(model, patterns) if patterns is not None else find_blocks(model)
    ends = set[int]()
    if patterns is None:
        blocks, ends = _with_large_ends(model, blocks)
    read = [{id(param) for param in block.parameters()} for _, block in blocks]
    users = Counter(key for keys in read for key in keys)
    outside = {id(param) for param in _parameters_outside(model, {id(block) for _, block in blocks})}
    # A weight that two blocks share, or that a module outside of the blocks reads, must outlive a single block.
    own = {key for key, count in users.items() if count == 1 and key not in outside}
    named = list(model.named_parameters())  # lists each parameter once
    root = UnitPlan(ROOT, model, tuple((name, param) for name, param in named if id(param) not in own))
    units = [root]
    for (name, block), keys in zip(blocks, read, strict=True):
        members = keys & own
        params = tuple((n, p) for n, p in named if id(p) in members)
        units.append(UnitPlan(name, block, params, is_end=id(block) in ends))
    # A block whose parameters are all shared needs no gather.
    return [unit for unit in units if unit.params or unit.is_root]


_Named = list[tuple[str, nn.Module]]


def _with_large_ends(model: nn.Module, blocks: _Named) -> tuple[_Named, set[int]]:
    """Add large embeddings and heads to the blocks. Returns their ids too. See [Note: large ends]."""
    if not blocks:
        return blocks, set()
    least = max(_MIN_END_NUMEL, MIN_SHARE_OF_PARAMETERS * max(numel(block) for _, block in blocks))
    places = {id(module): place for place, module in enumerate(model.modules())}
    first, last = (places[id(block)] for _, block in (blocks[0], blocks[-1]))
    inside = {id(part) for _, block in blocks for part in block.modules()}
    ends = [
        (name, module)
        for name, module in model.named_modules()
        if id(module) not in inside
        and not list(module.children())
        and (
            (isinstance(module, nn.Embedding) and places[id(module)] < first)
            or (isinstance(module, nn.Linear) and places[id(module)] > last)
        )
        and numel(module) >= least
    ]
    return sorted([*blocks, *ends], key=lambda named: places[id(named[1])]), {id(module) for _, module in ends}


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = [(name, module) for name, module in model.named_modules() if name]
    matches = [(n, m) for n, m in modules if any(fnmatchcase(n, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            known = ", ".join(sorted({name.split(".")[0] for name, _ in modules}))
            raise ValueError(
                f'zero_optimization.units: expected a pattern of module names, found "{pattern}", without a match; '
                f"the model's top modules are: {known or 'none'}"
            )
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in matches:
        running = running_modules(name, module)
        if not running and numel(module):
            raise ValueError(
                f'zero_optimization.units: expected modules with a forward, found "{name}", a {type(module).__name__} '
                "that has none, nor do its children; name the parent whose forward reads its parameters"
            )
        blocks.update({id(part): (part_name, part) for part_name, part in running})
    for name, block in blocks.values():
        inner = {id(module) for module in block.modules()} - {id(block)}
        nested = [blocks[key][0] for key in blocks if key in inner]
        if nested:
            raise ValueError(
                f'zero_optimization.units: expected modules that do not contain each other, but "{name}" '
                f'contains "{nested[0]}"; name either'
            )
    return list(blocks.values())


def _parameters_outside(model: nn.Module, blocks: set[int]) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) in blocks:
            continue
        found.extend(module.parameters(recurse=False))
        stack.extend(module.children())
    return found


QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Wire:
    """Bits per value in messages; None: the dtype as it is. See [Note: Quantized blocks] in kernels/quantized_blocks.

    | messages                                 | bits                                 |
    |------------------------------------------|--------------------------------------|
    | weights, gathered or refreshed           | `weights`; `frozen` if not trained   |
    | gradients, over axes between hosts       | `gradients`                          |
    | gradients, over axes within a host       | `gradients_in_host`                  |

    If parameters stay in memory (stages 1 and 2, hpZ), an update sends differences, and gathers within the groups of
    hpZ send weights unquantized. Sources: qwZ, qgZ and hpZ of ZeRO++, arXiv 2306.10209; weight differences and two
    levels of gradients of SDP4Bit, arXiv 2410.15526.
    """

    weights: int | None = None
    frozen: int | None = None
    gradients: int | None = None
    gradients_in_host: int | None = None
    ranks_of_host: int = 1

    def is_in_host(self, parallel_dims: ParallelDims, names: tuple[str, ...]) -> bool:
        """Whether ranks along these axes are on the same host. Ranks of a host are consecutive."""
        return parallel_dims.reach(names) < self.ranks_of_host

    def gradient_bits(self, parallel_dims: ParallelDims, names: tuple[str, ...], dtype: torch.dtype) -> int | None:
        """Return the bits of a gradient of that dtype over these axes."""
        if dtype not in QUANTIZED_DTYPES or self.gradients is None:
            return None
        return self.gradients_in_host if self.is_in_host(parallel_dims, names) else self.gradients

    def weight_bits(
        self, parallel_dims: ParallelDims, sharding: ShardingSpec, dtype: torch.dtype, is_frozen: bool
    ) -> int | None:
        """Return the bits of weights of that dtype; None if no weights are sent."""
        # hpZ sends quantized weights only in the refresh after an update.
        sent = sharding.refreshed if parallel_dims.size(sharding.refreshed) > 1 else sharding.parameters
        if dtype not in QUANTIZED_DTYPES or parallel_dims.size(sent) == 1:
            return None
        return self.frozen if is_frozen and self.frozen is not None else self.weights


PLAIN = Wire()


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of compute, reduction and accumulation. None: the parameter's, at least float32 for the last two."""

    compute: torch.dtype | None
    reduce: torch.dtype | None
    accumulate: torch.dtype | None
    kept: Collection[int] = ()  # ids of parameters that keep their dtype
    wire: Wire = PLAIN  # quantization of messages

    def of(self, param: Tensor) -> torch.dtype:
        """Return the compute dtype of a parameter."""
        if self.compute is None or not param.is_floating_point() or id(param) in self.kept:
            return param.dtype
        return self.compute


class Role(Enum):
    """The part of a parameter in the training. It decides the memory beside the parameter."""

    FROZEN = "frozen"  # no gradient, now or later
    LEFT_OUT = "left out"  # a gradient, no states: it is in no optimizer group
    UPDATED = "updated"  # a gradient, and states


Roles = Callable[[nn.Parameter], Role]


@dataclass(frozen=True)
class ParallelShard:
    """The part of a tensor that a rank has before ZeRO shards it, and the ranks with equal copies."""

    tensor_shard: TensorShard
    copies: tuple[Replicas, ...] = ()
    partitioned: tuple[str, ...] = ()  # see `ShardingSpec`

    @classmethod
    def all_of(cls, param: Tensor) -> ParallelShard:
        return cls(TensorShard.all_of(tuple(param.shape)))


ShardCounts = Callable[[nn.Parameter], ParallelShard]
Level = tuple[tuple[str, ...], int | None]
"""Axes over which a gradient is summed, and bits per value of its messages; None: the reduce dtype."""


@dataclass(frozen=True)
class GroupPlan:
    """A group before it has memory: its parameters, dtypes, layout and sharding spec."""

    name: str
    params: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype  # compute dtype
    reduce_dtype: torch.dtype  # of gradients in messages
    accumulation_dtype: torch.dtype  # of gradient sums over ranks and microbatches
    layout: FlatLayout
    sharding: ShardingSpec
    role: Role
    levels: tuple[Level, ...]  # sums of gradients over `sharding.states`
    replicas: Level  # the sum over `sharding.replicas`
    weight_bits: int | None  # per value of a weight in messages; None: unquantized
    sends_differences: bool  # an update sends the quantized changes of weights

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters, with padding."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's shard of the parameters."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def is_added_up_flat(self) -> bool:
        """Whether microbatch gradients are added in flat memory: their sum has a different dtype than `param.grad`."""
        return self.accumulation_dtype != self.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a message slot for the gradient, with room for its sum if the reduce dtype cannot hold it."""
        holds_sum = torch.promote_types(self.reduce_dtype, self.accumulation_dtype) == self.reduce_dtype
        sum_itemsize = 0 if holds_sum else self.accumulation_dtype.itemsize
        return self.layout.padded_numel * (self.reduce_dtype.itemsize + sum_itemsize)


@dataclass(frozen=True)
class ModelPlan:
    """A rank's part of a model, for mesh axes of given sizes. Ranks of a pipeline stage have the same plan."""

    units: tuple[tuple[UnitPlan, tuple[GroupPlan, ...]], ...]

    @classmethod
    def of(
        cls,
        units: Sequence[UnitPlan],
        dtypes: Dtypes,
        sharding: ShardingSpec,
        parallel_dims: ParallelDims,
        role_of: Roles,
        share_of: ShardCounts = ParallelShard.all_of,
        is_matrix: Callable[[nn.Parameter], bool] = lambda param: False,
    ) -> ModelPlan:
        """Plan the groups of all units. is_matrix: whether the optimizer updates the parameter as a matrix (Muon)."""
        groups = (
            (unit, tuple(_plan_groups(unit, dtypes, sharding, parallel_dims, role_of, share_of, is_matrix)))
            for unit in units
        )
        return cls(tuple(groups))

    @property
    def groups(self) -> list[GroupPlan]:
        return [group for _, groups in self.units for group in groups]

    @property
    def trained(self) -> list[GroupPlan]:
        """Groups that have gradients."""
        return [group for group in self.groups if group.role is not Role.FROZEN]

    @property
    def updated(self) -> list[GroupPlan]:
        """Groups that have gradients and states."""
        return [group for group in self.groups if group.role is Role.UPDATED]

    def rings(self, parallel_dims: ParallelDims) -> list[Ring]:
        """The message rings of the reductions, for each rank."""
        return rings_for(self.trained, parallel_dims)


Ring = tuple[tuple[str, ...], int, int]
"""(axes, bytes of a slot, number of slots)"""


def rings_for(trained: Sequence[GroupPlan], parallel_dims: ParallelDims) -> list[Ring]:
    """Return the message rings that reduce the gradients of these groups, for each rank."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for group in trained:
        states, replicas = parallel_dims.wide(group.sharding.states), parallel_dims.wide(group.sharding.replicas)
        # A unit is staged when the previous unit was summed; an all-reduce takes a phase more. More slots do not help:
        # ranks do not wait if they are less than a unit apart.
        # The sum over replicas begins with a shard, not with the whole gradient.
        rings = ((states, group.slot_bytes, 1), (replicas, group.slot_bytes // parallel_dims.size(states), 2))
        for axes, nbytes, count in rings:
            most, slots = found.get(axes, (0, 0))
            found[axes] = max(most, nbytes), max(slots, count)
    return [(axes, nbytes, count) for axes, (nbytes, count) in found.items() if axes and nbytes]


def _plan_groups(
    unit: UnitPlan,
    dtypes: Dtypes,
    sharding: ShardingSpec,
    parallel_dims: ParallelDims,
    role_of: Roles,
    share_of: ShardCounts,
    is_matrix: Callable[[nn.Parameter], bool],
) -> Iterable[GroupPlan]:
    Key = tuple[torch.dtype, Role, tuple[Replicas, ...], tuple[str, ...], bool]
    members: dict[Key, list[tuple[str, nn.Parameter]]] = {}
    for name, param in unit.params:
        share = share_of(param)
        key = dtypes.of(param), role_of(param), share.copies, share.partitioned, is_matrix(param)
        members.setdefault(key, []).append((name, param))
    for (dtype, role, copies, partitioned, has_matrices), params in members.items():
        kind = f"{str(dtype).removeprefix('torch.')}{'' if role is Role.UPDATED else f', {role.value}'}"
        kind += "".join(f", on {replica.axis} {', '.join(map(str, replica.places))}" for replica in copies)
        kind += "".join(f", split over {axis}" for axis in partitioned)
        kind += ", matrices" if has_matrices else ""
        own = replace(sharding.within(partitioned), copies=(*unit.copies, *copies))
        yield plan_group(f"unit {unit.name} ({kind})", params, dtype, role, dtypes, own, parallel_dims, share_of)


def plan_group(
    name: str,
    params: Sequence[tuple[str, nn.Parameter]],
    dtype: torch.dtype,
    role: Role,
    dtypes: Dtypes,
    sharding: ShardingSpec,
    parallel_dims: ParallelDims,
    share_of: ShardCounts = ParallelShard.all_of,
) -> GroupPlan:
    """Plan a group of these parameters, computed in `dtype`."""
    reduce, wire = _at_least_float32(dtypes.reduce, dtype), dtypes.wire

    def level(axes: tuple[str, ...]) -> Level:
        return axes, wire.gradient_bits(parallel_dims, axes, reduce)

    weight_bits = wire.weight_bits(parallel_dims, sharding, dtype, role is Role.FROZEN)
    in_two = parallel_dims.size(sharding.first) > 1 and parallel_dims.size(sharding.last) > 1
    return GroupPlan(
        name=name,
        params=tuple(params),
        dtype=dtype,
        reduce_dtype=reduce,
        accumulation_dtype=_at_least_float32(dtypes.accumulate, dtype),
        layout=FlatLayout.of_tensor_shards(
            [(name, share_of(param).tensor_shard) for name, param in params], parallel_dims.size(sharding.states)
        ),
        sharding=sharding,
        role=role,
        levels=tuple(map(level, (sharding.first, sharding.last) if in_two else (sharding.states,))),
        replicas=level(sharding.replicas),
        weight_bits=weight_bits,
        sends_differences=weight_bits is not None and parallel_dims.size(sharding.refreshed) > 1,
    )


def _at_least_float32(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the requested dtype, or float32 by default. float64 parameters keep float64."""
    if dtype == torch.float64:
        return dtype
    return wanted if wanted is not None else torch.float32
