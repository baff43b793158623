"""Add parameter groups to the optimizer after the engine was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...comm import Mesh
from ...zero.build import GroupMemories
from ...zero.group import ShardedGroup
from ...zero.host_update import HostUpdate
from ...zero.optimizer import ShardedOptimizer
from ...zero.placement import ShardStore
from ...zero.plan import GroupPlan, Role, plan_group
from ...zero.sequence import StateError
from ...zero.unit import Unit
from ..archive.agreement import no_rank_alone
from ..blueprint.blueprint import Blueprint
from ..blueprint.places import shares_of
from .runner import Runner

ADDING = "engine.optimizer.add_param_group()"


@dataclass(frozen=True)
class _Division:
    """A flat group that is divided into trained and remaining parameters."""

    unit: Unit
    group: ShardedGroup
    taken: GroupPlan
    left: GroupPlan | None  # None: all are taken, so the group keeps its memory

    @property
    def is_split(self) -> bool:
        return self.left is not None

    @property
    def plans(self) -> list[GroupPlan]:
        return [self.taken] if self.left is None else [self.left, self.taken]


class AddedParameterGroups:
    """Gives parameters outside of the optimizer's groups gradients, master weights and states.

        unit    | updated | frozen                      |
        later   | updated | frozen | updated from now on|

    If all parameters of a flat group are added, for example those of a block, the group stays where it is. Else its
    values move into two groups with new memory, and the old memory is freed; memory that ranks share is freed when the
    engine closes. At most one such flat group is full at a time.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        mesh: Mesh,
        memories: GroupMemories,
        runner: Runner,
        optimizer: ShardedOptimizer,
        shard_store: ShardStore | None,
        host: HostUpdate | None,
    ) -> None:
        """memories: makes the memory of groups. shard_store, host: as for `ShardedOptimizer`."""
        self._blueprint = blueprint
        self._mesh = mesh
        self._memories = memories
        self._runner = runner
        self._optimizer = optimizer
        self._shard_store = shard_store
        self._host = host
        self._names = {id(param): name for name, param in runner.whole.params.items()}

    def add(self, param_group: dict[str, Any], check: Callable[[dict[str, Any]], None]) -> None:
        """Add the group, with all its options. A collective, between steps. check: raises to refuse the group.

        Raises ValueError for wrong parameters, RuntimeError if the groups of ranks differ, StateError if its
        parameters are gathered. Then nothing has changed.
        """
        with no_rank_alone(self._mesh.world, ADDING):
            self._check(param_group)
            check(param_group)
        self._check_ranks_agree(param_group)
        # A group that is read beside the model stays full until the end of a step. Full memory cannot be divided.
        self._runner.passes.release_all()
        divisions = self._divisions({id(param) for param in param_group["params"]})
        with no_rank_alone(self._mesh.world, ADDING):
            self._check_released([one.group for one in divisions])
            self._reserve_store(divisions)
        new = [plan for one in divisions if one.is_split for plan in one.plans]
        made = dict(zip((plan.name for plan in new), self._memories.groups(new), strict=True))
        groups = {plan.name: made.get(plan.name, one.group) for one in divisions for plan in one.plans}
        taken = [one.taken for one in divisions]
        trained = [plan for one in divisions for plan in one.plans if plan.role is not Role.FROZEN]
        hosts = (
            {} if self._host is None else dict.fromkeys(self._blueprint.offload_plan.updated_apart(taken), self._host)
        )
        made_gradients = self._memories.gradients([(plan, groups[plan.name]) for plan in trained], hosts)
        gradients = {plan.name: gradient for plan, gradient in zip(trained, made_gradients, strict=True)}
        with no_rank_alone(self._mesh.world, ADDING):
            of_taken, number = [gradients[plan.name] for plan in taken], len(self._optimizer.param_groups)
            shards = self._optimizer.make_shards(of_taken, {number: param_group})
        # Nothing can fail from here on, so the engine may change.
        for one in divisions:
            own = [groups[plan.name] for plan in one.plans]
            if one.is_split:
                self._move(one.group, own)
            # A group that is taken as a whole keeps its memory: only its role changes, from frozen to updated.
            groups[one.taken.name].plan = one.taken
            parts = [part for group in one.unit.groups for part in (own if group is one.group else [group])]
            of_group = {id(gradient.group): gradient for gradient in one.unit.gradients}
            of_group |= {id(groups[plan.name]): gradients[plan.name] for plan in one.plans if plan.name in gradients}
            one.unit.register_groups(parts, [of_group[id(part)] for part in parts if id(part) in of_group])
        self._runner.register_groups([one.unit for one in divisions])
        self._optimizer.register_groups(param_group, shards)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check(self, param_group: Mapping[str, Any]) -> None:
        params = param_group["params"]
        others = {id(p): index for index, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        if not params:
            raise ValueError(f"{ADDING}: expected parameters of the model, found none")
        for param in params:
            name = self._names.get(id(param))
            if name is None:
                raise ValueError(
                    f"{ADDING}: expected parameters of the engine's module, such as engine.module.head.parameters(), "
                    f"found a {type(param).__name__} of another module"
                )
            if id(param) in others:
                raise ValueError(
                    f"{ADDING}: expected parameters that are in no group, found '{name}' of group "
                    f"{others[id(param)]}; change the options of that group"
                )
            if not param.is_floating_point():
                raise ValueError(
                    f"{ADDING}: expected parameters of floating-point numbers, found '{name}' of {param.dtype}"
                )
            # So the check above also finds a parameter that stands twice in the new group.
            others[id(param)] = len(self._optimizer.param_groups)
        self._optimizer.check_options(param_group)

    def _check_ranks_agree(self, param_group: Mapping[str, Any]) -> None:
        names = [self._names[id(param)] for param in param_group["params"]]
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(param_group.items()) if key != "params")
        everyone = self._mesh.world.gather_objects((names, options))
        for rank, (theirs, other) in enumerate(everyone):
            for found, first in ((other, everyone[0][1]), (theirs, everyone[0][0])):
                if found != first:
                    raise RuntimeError(
                        f"{ADDING}: expected the same group on all ranks, found {first} on rank 0, {found} on rank "
                        f"{rank}"
                    )

    def _check_released(self, groups: Sequence[ShardedGroup]) -> None:
        held = [group.layout.names for group in groups if group.keeper is not None and group.keeper()]
        if held:
            raise StateError(
                f"{ADDING}: expected no gathered parameters, found '{held[0][0]}' gathered; call it outside of "
                "`with engine.gathered():` (zero.GatheredParameters in lowtide.deepspeed)"
            )

    def _reserve_store(self, divisions: Sequence[_Division]) -> None:
        """Reserve room in the store for the shards of new groups. Raise OffloadError if it is full."""
        new = [plan.shard_bytes for one in divisions if one.is_split for plan in one.plans]
        if self._shard_store is not None and new:
            now = [group.shard.nbytes for unit in self._runner.passes.units for group in unit.groups]
            self._shard_store.reserve([*now, *new])

    # -- pieces of `add` ------------------------------------------------------------------------------------------

    def _divisions(self, wanted: set[int]) -> list[_Division]:
        number = len(self._optimizer.param_groups)
        found = []
        for unit in self._runner.passes.units:
            for group in unit.groups:
                plan = group.plan
                taken = [(name, param) for name, param in plan.params if id(param) in wanted]
                left = [(name, param) for name, param in plan.params if id(param) not in wanted]
                if not taken:
                    continue
                called = f"unit {unit.name} ({str(plan.dtype).removeprefix('torch.')}, {plan.role.value}"
                # Split and whole groups of a unit may have the same dtype and role, and names must differ.
                if sum((one.plan.dtype, one.plan.role) == (plan.dtype, plan.role) for one in unit.groups) > 1:
                    called += f", with {group.layout.names[0]}"
                found.append(
                    _Division(
                        unit,
                        group,
                        self._plan(f"{called} before group {number})", group, taken, Role.UPDATED),
                        self._plan(f"{called} after group {number})", group, left, plan.role) if left else None,
                    )
                )
        return found

    def _plan(self, name: str, like: ShardedGroup, params: Sequence[Any], role: Role) -> GroupPlan:
        dtypes, parallel_dims = self._blueprint.dtypes, self._blueprint.parallel_dims
        shares = shares_of(self._blueprint.tensor, self._blueprint.experts, self._mesh.place)
        return plan_group(name, params, like.plan.dtype, role, dtypes, like.plan.sharding, parallel_dims, shares)

    @torch.no_grad()
    def _move(self, old: ShardedGroup, new: Sequence[ShardedGroup]) -> None:
        """Move the values of a group into new groups. The parameters become views of these."""
        old.gather()
        # A gather in few bits has rounded values, and the new shards must begin with the exact values.
        old.make_exact()
        for group in new:
            for param_shard in group.param_shards:
                group.place(param_shard, group.params[param_shard.index].data)
        # Autograd must refuse a backward of an earlier graph: the memory of its saved parameters may be freed.
        torch.autograd.graph.increment_version(old.params)
        pending = [group.refresh() for group in new]
        for one in pending:
            one.wait()
        # Ranks that share the new memory read it next, and another rank may still write its part.
        self._mesh.fence("the parameters of a group that was divided")
        if old.frees_memory:  # else releasing would only remove the parameters' data, and the new groups need it
            old.release()
        if self._shard_store is not None:
            self._shard_store.drop(old.offloadable.name)
        for group in new:
            group.install()
            group.release()
