"""The units of a model with the layouts of their groups: what is built, before it takes memory.

A unit is gathered, reduced and released together.

[Note: large ends]
The rest is gathered as long as the model runs, before its first block, and its gradient is reduced when the backward
has ended, with nothing beside it. A vocabulary of 128,000 makes it larger than a block. So an embedding and a head are
units of their own where they are large, and where the order of registration, in which units are gathered, is that of
their use: an embedding is used before the blocks, a linear layer outside of them behind. What is tied is used twice,
and stays with the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..comm import Arrangement
from ..model.blocks import MIN_SHARE_OF_PARAMETERS, find_blocks, numel, running_modules
from ..offload import Portion
from .domain import Copies, Domain
from .layout import FlatLayout

REST = "(rest)"

_MIN_END_NUMEL = 1 << 20  # a message of less than some MiB costs its latency


@dataclass(frozen=True)
class UnitPlan:
    """One unit: a module, and the parameters that it alone uses. The rest of the model is the unit of the root."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    copies: tuple[Copies, ...] = ()
    is_end: bool = False  # a large embedding or head, and no block

    @property
    def is_rest(self) -> bool:
        return self.name == REST


def plan_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[UnitPlan]:
    """The units in the order of registration, the rest first.

    Without patterns a unit is an element of an outermost `ModuleList` or `Sequential` whose elements repeat one class
    and hold a good part of the model, and each large embedding before these and linear layer behind them.
    patterns: shell-style patterns of module names; each match is a unit.
    For a container it is what runs in it: see [Note: what runs] in `blocks.py`.
    A parameter that several units use belongs to the rest, under its first name.
    Raises ValueError for a pattern that matches no module, or none that runs, or where units contain each other.
    """
    blocks = _named_blocks(model, patterns) if patterns is not None else find_blocks(model)
    ends = set[int]()
    if patterns is None:
        blocks, ends = _with_large_ends(model, blocks)
    read = [{id(param) for param in block.parameters()} for _, block in blocks]
    users = Counter(key for keys in read for key in keys)
    outside = {id(param) for param in _parameters_outside(model, {id(block) for _, block in blocks})}
    own = {key for key, count in users.items() if count == 1 and key not in outside}
    named = list(model.named_parameters())  # each parameter once
    rest = UnitPlan(REST, model, tuple((name, param) for name, param in named if id(param) not in own))
    units = [rest]
    for (name, block), keys in zip(blocks, read, strict=True):
        members = keys & own
        params = tuple((n, p) for n, p in named if id(p) in members)
        units.append(UnitPlan(name, block, params, is_end=id(block) in ends))
    return [unit for unit in units if unit.params or unit.is_rest]


_Named = list[tuple[str, nn.Module]]


def _with_large_ends(model: nn.Module, blocks: _Named) -> tuple[_Named, set[int]]:
    """The blocks and what is large at both ends of a model, and the identities of that: [Note: large ends]."""
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
                f'zero_optimization.units: expected a pattern of module names, found "{pattern}", which matches no '
                f"module; the model's top modules are: {known or 'none'}"
            )
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in matches:
        running = running_modules(name, module)
        if not running and numel(module):
            raise ValueError(
                f'zero_optimization.units: expected modules that are called, found "{name}", a {type(module).__name__} '
                "without a forward, and without modules that have one; name the module around it, whose forward reads "
                "its parameters"
            )
        blocks.update({id(part): (part_name, part) for part_name, part in running})
    for name, block in blocks.values():
        inner = {id(module) for module in block.modules()} - {id(block)}
        nested = [blocks[key][0] for key in blocks if key in inner]
        if nested:
            raise ValueError(
                f'zero_optimization.units: expected modules that do not contain each other, found "{name}" which '
                f'contains "{nested[0]}"; name one of them'
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
    """The bits of a value in messages; None: its own dtype. See [Note: Quantized blocks] in kernels/quantized_blocks.

    | messages                                         | bits                                                |
    |--------------------------------------------------|-----------------------------------------------------|
    | weights, when they are gathered or refreshed     | `weights`; `frozen`, of those that are not trained  |
    | gradients, over axes that leave a host           | `gradients`                                         |
    | gradients, over axes within one                  | `gradients_in_host`                                 |

    Where parameters stay (stages 1 and 2, hpZ) what an update has changed is sent, and gathers within the groups of hpZ
    send weights as they are. Sources: qwZ, qgZ and hpZ of ZeRO++, arXiv 2306.10209; weight differences and two levels
    of gradients of SDP4Bit, arXiv 2410.15526.
    """

    weights: int | None = None
    frozen: int | None = None
    gradients: int | None = None
    gradients_in_host: int | None = None
    ranks_of_host: int = 1

    def is_in_host(self, arrangement: Arrangement, names: tuple[str, ...]) -> bool:
        """Whether ranks that differ on these axes alone are on one host: hosts have ranks one after the other."""
        return arrangement.reach(names) < self.ranks_of_host

    def gradient_bits(self, arrangement: Arrangement, names: tuple[str, ...], dtype: torch.dtype) -> int | None:
        """Of a gradient of that dtype, over these axes."""
        if dtype not in QUANTIZED_DTYPES or self.gradients is None:
            return None
        return self.gradients_in_host if self.is_in_host(arrangement, names) else self.gradients

    def weight_bits(self, arrangement: Arrangement, domain: Domain, dtype: torch.dtype, is_frozen: bool) -> int | None:
        """Of weights of that dtype, where any are sent."""
        sent = domain.refreshed if arrangement.size(domain.refreshed) > 1 else domain.parameters
        if dtype not in QUANTIZED_DTYPES or arrangement.size(sent) == 1:
            return None
        return self.frozen if is_frozen and self.frozen is not None else self.weights


PLAIN = Wire()


@dataclass(frozen=True)
class Dtypes:
    """What is computed, reduced and accumulated in. None: as the parameter, and at least float32 for the last two."""

    compute: torch.dtype | None
    reduce: torch.dtype | None
    accumulate: torch.dtype | None
    kept: Collection[int] = ()  # identities of parameters that are computed in their own dtype
    wire: Wire = PLAIN  # what messages have in fewer bits

    def of(self, param: Tensor) -> torch.dtype:
        """The dtype in which a parameter is computed."""
        if self.compute is None or not param.is_floating_point() or id(param) in self.kept:
            return param.dtype
        return self.compute


class Role(Enum):
    """What becomes of a parameter in training, and which memory is taken for it beside its own."""

    FROZEN = "frozen"  # nothing: it has no gradient, now or later
    LEFT_OUT = "left out"  # a gradient, and no states: no group of the optimizer has it
    UPDATED = "updated"  # a gradient, and states


Roles = Callable[[nn.Parameter], Role]


@dataclass(frozen=True)
class Share:
    """What a rank has of a parameter before that is sharded, and which others have the same of it."""

    portion: Portion
    copies: tuple[Copies, ...] = ()
    portioned: tuple[str, ...] = ()  # as of `Domain`

    @classmethod
    def all_of(cls, param: Tensor) -> Share:
        return cls(Portion.all_of(tuple(param.shape)))


Shares = Callable[[nn.Parameter], Share]
Level = tuple[tuple[str, ...], int | None]
"""Axes over which a gradient is summed, and the bits of what is sent of it; None: those of the reduce dtype."""


@dataclass(frozen=True)
class GroupPlan:
    """A group before it has memory: its parameters, dtypes, layout and domain."""

    name: str
    params: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype  # of the parameters, as they are computed
    reduce_dtype: torch.dtype  # of gradients between ranks
    accumulation_dtype: torch.dtype  # of their sums over ranks and microbatches
    layout: FlatLayout
    domain: Domain
    role: Role
    levels: tuple[Level, ...]  # of the sum of gradients over `domain.states`
    replicas: Level  # of that over `domain.replicas`
    weight_bits: int | None  # of weights that go to other ranks; None: they go as they are
    sends_differences: bool  # what goes there is what an update has changed of their copies, and nothing else

    @property
    def full_bytes(self) -> int:
        """Of all parameters, with padding."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Of a rank's part of the parameters."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def is_added_up_flat(self) -> bool:
        """Whether autograd cannot add up the gradients of a step's microbatches: their sum has another dtype."""
        return self.accumulation_dtype != self.dtype

    @property
    def slot_bytes(self) -> int:
        """Of the gradient where it is staged, with its sum where the reduce dtype cannot hold that."""
        holds_sum = torch.promote_types(self.reduce_dtype, self.accumulation_dtype) == self.reduce_dtype
        sum_itemsize = 0 if holds_sum else self.accumulation_dtype.itemsize
        return self.layout.padded_numel * (self.reduce_dtype.itemsize + sum_itemsize)


@dataclass(frozen=True)
class ModelPlan:
    """What one rank has of a model, on axes of given sizes. Ranks of one pipeline place have the same."""

    units: tuple[tuple[UnitPlan, tuple[GroupPlan, ...]], ...]

    @classmethod
    def of(
        cls,
        units: Sequence[UnitPlan],
        dtypes: Dtypes,
        domain: Domain,
        arrangement: Arrangement,
        role_of: Roles,
        share_of: Shares = Share.all_of,
        is_matrix: Callable[[nn.Parameter], bool] = lambda param: False,
    ) -> ModelPlan:
        """is_matrix: whether a parameter has other states than the rest, as its update is of whole matrices."""
        groups = (
            (unit, tuple(_plan_groups(unit, dtypes, domain, arrangement, role_of, share_of, is_matrix)))
            for unit in units
        )
        return cls(tuple(groups))

    @property
    def groups(self) -> list[GroupPlan]:
        return [group for _, groups in self.units for group in groups]

    @property
    def trained(self) -> list[GroupPlan]:
        """Those that have gradients."""
        return [group for group in self.groups if group.role is not Role.FROZEN]

    @property
    def updated(self) -> list[GroupPlan]:
        """Those that have gradients and states."""
        return [group for group in self.groups if group.role is Role.UPDATED]

    def rings(self, arrangement: Arrangement) -> list[Ring]:
        """Through which gradients are reduced, for each rank."""
        return rings_for(self.trained, arrangement)


Ring = tuple[tuple[str, ...], int, int]
"""(axes, bytes of a slot, number of slots)"""


def rings_for(trained: Sequence[GroupPlan], arrangement: Arrangement) -> list[Ring]:
    """Through which the gradients of these groups are reduced, for each rank."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for group in trained:
        states, replicas = arrangement.wide(group.domain.states), arrangement.wide(group.domain.replicas)
        # A unit is staged when the one before it was summed; an all-reduce takes one more phase. One more is no faster:
        # ranks that are apart by less than a unit do not wait.
        rings = ((states, group.slot_bytes, 1), (replicas, group.slot_bytes // arrangement.size(states), 2))
        for axes, nbytes, count in rings:
            most, slots = found.get(axes, (0, 0))
            found[axes] = max(most, nbytes), max(slots, count)
    return [(axes, nbytes, count) for axes, (nbytes, count) in found.items() if axes and nbytes]


def _plan_groups(
    unit: UnitPlan,
    dtypes: Dtypes,
    domain: Domain,
    arrangement: Arrangement,
    role_of: Roles,
    share_of: Shares,
    is_matrix: Callable[[nn.Parameter], bool],
) -> Iterable[GroupPlan]:
    Key = tuple[torch.dtype, Role, tuple[Copies, ...], tuple[str, ...], bool]
    members: dict[Key, list[tuple[str, nn.Parameter]]] = {}
    for name, param in unit.params:
        share = share_of(param)
        key = dtypes.of(param), role_of(param), share.copies, share.portioned, is_matrix(param)
        members.setdefault(key, []).append((name, param))
    for (dtype, role, copies, portioned, has_matrices), params in members.items():
        kind = f"{str(dtype).removeprefix('torch.')}{'' if role is Role.UPDATED else f', {role.value}'}"
        kind += "".join(f", on {one.axis} {', '.join(map(str, one.places))}" for one in copies)
        kind += "".join(f", split over {axis}" for axis in portioned)
        kind += ", matrices" if has_matrices else ""
        own = replace(domain.within(portioned), copies=(*unit.copies, *copies))
        yield plan_group(f"unit {unit.name} ({kind})", params, dtype, role, dtypes, own, arrangement, share_of)


def plan_group(
    name: str,
    params: Sequence[tuple[str, nn.Parameter]],
    dtype: torch.dtype,
    role: Role,
    dtypes: Dtypes,
    domain: Domain,
    arrangement: Arrangement,
    share_of: Shares = Share.all_of,
) -> GroupPlan:
    """A group of its own of these parameters, which are computed in `dtype`."""
    reduce, wire = _at_least_float32(dtypes.reduce, dtype), dtypes.wire

    def level(axes: tuple[str, ...]) -> Level:
        return axes, wire.gradient_bits(arrangement, axes, reduce)

    weight_bits = wire.weight_bits(arrangement, domain, dtype, role is Role.FROZEN)
    in_two = arrangement.size(domain.first) > 1 and arrangement.size(domain.last) > 1
    return GroupPlan(
        name=name,
        params=tuple(params),
        dtype=dtype,
        reduce_dtype=reduce,
        accumulation_dtype=_at_least_float32(dtypes.accumulate, dtype),
        layout=FlatLayout.of_portions(
            [(name, share_of(param).portion) for name, param in params], arrangement.size(domain.states)
        ),
        domain=domain,
        role=role,
        levels=tuple(map(level, (domain.first, domain.last) if in_two else (domain.states,))),
        replicas=level(domain.replicas),
        weight_bits=weight_bits,
        sends_differences=weight_bits is not None and arrangement.size(domain.refreshed) > 1,
    )


def _at_least_float32(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that was asked for, else float32; float64 parameters keep float64."""
    if dtype == torch.float64:
        return dtype
    return wanted if wanted is not None else torch.float32
