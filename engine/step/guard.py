"""Notice changes of the model's parameters behind the engine's back, which would be lost silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...zero.group import ShardedGroup, ShardedState
from ...zero.plan import Role
from ..blueprint.blueprint import Timing
from .features import StepFeature
from .parts import Parts

_NUM_SAMPLED = 4  # of a parameter
_Look = tuple[list[Tensor], list[Tensor]]
"""(remembered values, found values); of several comparisons in a step, the first difference of each element."""


class ParameterFingerprints(StepFeature):
    """Finds parameters whose values have changed, by some elements of each. On a device the host does not wait.

    It is on if a parameter that exists in copies (`_watched`) has values between steps.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._mesh = parts.mesh
        self.is_on = False
        self._read_groups()
        self.is_on = bool(self._samples)

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        # A delayed update reaches the parameters in any call that flushes it, not in steps alone.
        return None if Timing.of(parts.config) is Timing.DELAYED else cls(parts)

    def after_new_groups(self) -> None:
        self._read_groups()
        if self._samples and not self.is_on:
            self._parts.steps.features.turn_on(self)

    def _read_groups(self) -> None:
        every = [group for unit in self._parts.runner.passes.units for group in unit.groups]
        # Groups that are sharded between steps have no values to look at.
        groups = [group for group in _watched(every) if not group.plan.sharding.parameters]
        # If another rank may write to these values, it must wait until they are remembered here.
        self._shares_values = bool(groups) and any(group.axes.copies_are_shared for group in every)
        is_later = Timing.of(self._parts.config) is Timing.AFTER_NORM  # else the update may have changed them already
        self._compares_at_end = self._shares_values and is_later
        dtypes = dict.fromkeys(group.plan.dtype for group in groups)
        self._samples = [_Samples([group for group in groups if group.plan.dtype == dtype]) for dtype in dtypes]
        self._values: list[Tensor] | None = None
        self._memory: list[Tensor] = []  # buffers of the last remembered values
        self._seen: Tensor | None = None  # () bool on a device: a value has changed
        self._looks: list[_Look] = []
        self._covered: list[_Look] = []  # comparisons that the last `before_update` covers
        self.after_change()

    def after_change(self) -> None:
        """Remember the values at the end of a step, or after a change by the engine."""
        self._covered = []
        # An unread comparison of this step names the changed parameter from the last values, so these are not
        # overwritten.
        is_looked_at = self._looks and any(values is self._memory for values, _ in self._looks)
        if self._samples and (is_looked_at or not self._memory):
            self._memory = [sample.take() for sample in self._samples]
        else:  # at the addresses of the last step, so that later allocations have their old addresses too
            for sample, out in zip(self._samples, self._memory, strict=True):
                sample.take(out)
        self._values = self._memory

    def after_refresh(self) -> None:
        self.after_change()

    def after_update(self, skipped: bool) -> None:
        self.after_change()
        if self._shares_values:  # else a rank that is ahead may change values while they are remembered here
            self._mesh.fence("the end of a step")

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Raise ValueError if a parameter was changed. On a device `before_update` records it instead."""
        if self._values is None:
            self.after_change()
            return
        now, differs = self._look(self._values)
        if differs[0].device.type == "cpu":
            if any(map(bool, differs)):
                raise ValueError(_CHANGED.format(name=self._first_difference(self._values, now), how="through .data"))
            return
        # A single comparison per step, over all its microbatches.
        if self._looks and self._looks[-1][0] is self._values:
            _, earlier = self._looks.pop()
            changed = zip(self._values, earlier, now, strict=True)
            # A difference that an earlier microbatch has seen stays, also if the caller has undone the change since.
            now = [torch.where(then != old, then, last) for old, then, last in changed]
        self._looks.append((self._values, now))
        differs += [] if self._seen is None else [self._seen]
        self._seen = torch.stack(differs).any()

    def _look(self, values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        now = [sample.take() for sample in self._samples]
        return now, [(old != new).any() for old, new in zip(values, now, strict=True)]

    def before_update(self) -> None:
        """Record a change that `before_forward` has found on a device since the last call, or a forward has made."""
        values, self._values = self._values, None  # the update changes them, and `after_update` follows it
        seen, self._seen = self._seen, None
        self._covered, self._looks = self._looks, []
        # Ranks that share the values change them in each forward, one after the other.
        if self._compares_at_end and values is not None:
            now, differs = self._look(values)
            self._covered, seen = [(values, now)], torch.stack(differs).any()
        if seen is not None:
            self._parts.steps.accumulated.note_inconsistency(self, seen)

    def explain_inconsistency(self) -> None:
        """Raise ValueError on all ranks if `before_update` recorded a change on any rank. A collective."""
        own = ""
        for old, new in self._covered:
            if name := self._first_difference(old, new):
                self._values = old  # the next step must not accept the change
                own = _CHANGED.format(name=name, how="through .data")
                break
        if found := [text for text in self._mesh.world.gather_objects(own) if text]:
            raise ValueError(found[0])

    def _first_difference(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> str:
        for sample, before, now in zip(self._samples, old, new, strict=True):
            if not torch.equal(before, now):
                return sample.first_difference(before, now)
        return ""


class _Samples:
    """Some elements of each parameter of a dtype, as bits. They show changes of a whole tensor or of its first rows."""

    def __init__(self, groups: Sequence[ShardedGroup]) -> None:
        self._bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[groups[0].plan.dtype.itemsize]
        param_views = [
            (group.full, param_view) for group in groups for param_view in group.layout.param_views if param_view.numel
        ]
        self._views = [
            full[param_view.in_flat][:: max(1, (param_view.numel - 1) // (_NUM_SAMPLED - 1))]
            for full, param_view in param_views
        ]
        self._names = [
            param_view.name for (_, param_view), view in zip(param_views, self._views, strict=True) for _ in view
        ]

    def take(self, out: Tensor | None = None) -> Tensor:
        """Return the samples as they are now. out: a tensor of an earlier call, to write them into."""
        if out is None:
            return torch.cat(self._views).view(self._bits)
        torch.cat(self._views, out=out.view(self._views[0].dtype))
        return out

    def first_difference(self, old: Tensor, new: Tensor) -> str:
        return self._names[int((old != new).nonzero()[0])]


class ModelGuard(StepFeature):
    """Compares the model's parameters with those that the engine knows.

    | compared                                    | parameters                                          |
    |---------------------------------------------|-----------------------------------------------------|
    | identity at its name                        | all                                                 |
    | requires_grad                               | frozen, and in no group of the optimizer            |
    | memory: it is a view of a flat buffer       | all that are full                                   |
    | version: number of changes in place         | those with a copy: master weights, other ranks;     |
    |                                             | not under PEFT's `target_parameters`                |
    | some elements, for changes through `.data`  | those with a copy that are full between steps:      |
    |                                             | `ParameterFingerprints`                             |
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._module = parts.module
        self.after_new_groups()

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def after_new_groups(self) -> None:
        groups = [group for unit in self._parts.runner.passes.units for group in unit.groups]
        members = [(group, name, p) for group in groups for name, p in group.plan.params]
        self._params = [(name, param) for group, name, param in members if group.plan.role is Role.FROZEN]
        self._known = {id(param): name for _, name, param in members}
        self._groups = groups
        watched = set(map(id, _watched(groups)))
        own_changes = _changed_by_forwards(self._module)
        self._watched = [
            (name, param) for group, name, param in members if id(group) in watched and id(param) not in own_changes
        ]
        # With all names of tied parameters: `_check_places` finds the name that was tied later.
        self._places = dict(self._module.named_parameters(remove_duplicate=False))
        self._modules = _Modules(self._module)
        self._updated = [p for group, _, p in members if group.plan.role is not Role.FROZEN]
        grown = set(map(id, self._updated))
        self._grows = [int(id(param) in grown) for _, param in self._watched]
        self._versions: list[int] = []  # how often each watched parameter was changed in place
        self.after_change()

    def after_change(self) -> None:
        """Accept the parameters as they are now."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [*map(_VERSION, map(_PARAM, self._watched))]

    def after_update(self, skipped: bool) -> None:
        """Mark the parameters as changed: autograd refuses a backward of earlier graphs, as after a step of torch."""
        if not skipped:
            # An update writes flat buffers. Autograd does not see that the parameters, which have separate versions,
            # change.
            torch.autograd.graph.increment_version(self._updated)
            for index, by in enumerate(self._grows):
                # The increment above is no change by the caller.
                self._versions[index] += by

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Raise ValueError if a parameter was added, replaced, tied, removed, unfrozen or changed."""
        if self._modules.have_changed():
            self._check_places()
        with torch._C.DisableTorchFunctionSubclass():  # else each attribute of a released parameter costs a Python call
            for name, param in self._params:
                if param.requires_grad:
                    raise ValueError(
                        f"parameter '{name}': expected requires_grad=False as at lowtide.initialize, found True; it is "
                        "in no group of the optimizer; add it by engine.optimizer.add_param_group"
                    )
            versions = [*map(_VERSION, map(_PARAM, self._watched))]
            for group in self._groups:
                if group.frees_memory and group.sharded_state is not ShardedState.UNSHARDED:
                    continue
                if (assigned := group.assigned()) is not None:
                    raise ValueError(
                        f"parameter '{assigned}' got new memory (an assignment to its .data, or .to(), .half(), ...), "
                        f"but the engine updates and saves the old memory; {_INSTEAD}"
                    )
        if versions != self._versions:
            pairs = zip(self._watched, versions, self._versions, strict=True)
            name = next(name for (name, _), version, before in pairs if version != before)
            raise ValueError(_CHANGED.format(name=name, how="in place"))

    def _check_places(self) -> None:
        """Raise ValueError if another parameter stands at a name. Else accept the modules as they are now."""
        found = dict(self._module.named_parameters(remove_duplicate=False))
        for name, param in found.items():
            if id(param) not in self._known:
                raise ValueError(
                    f"parameter '{name}' was added or replaced after lowtide.initialize, so the engine does not know "
                    "it; change the model first, then call initialize again"
                )
            if self._places.get(name, param) is not param:
                raise ValueError(
                    f"parameter '{name}' was tied to '{self._known[id(param)]}' after lowtide.initialize, but the "
                    "engine would still update and save its old value; tie them first, then call initialize again"
                )
        present = {id(param) for param in found.values()}
        gone = next((name for name, param in self._places.items() if id(param) not in present), None)
        if gone is not None:
            raise ValueError(
                f"parameter '{gone}' was removed from the model after lowtide.initialize, but the engine would still "
                "update and save it; change the model first, then call initialize again"
            )
        self._modules = _Modules(self._module)


def _watched(groups: Sequence[ShardedGroup]) -> list[ShardedGroup]:
    """Return the groups of parameters with a copy: shared or sharded with other ranks, or rounded from wider masters.

    The copy does not see a change of the caller.
    """
    are_shared = any(group.axes.copies_are_shared for group in groups)

    def has_masters(group: ShardedGroup) -> bool:
        return group.plan.dtype.itemsize < 4 and group.plan.role is not Role.FROZEN

    return [group for group in groups if are_shared or group.frees_memory or has_masters(group)]


def _changed_by_forwards(module: nn.Module) -> set[int]:
    """Return the identities of parameters under PEFT's `target_parameters`.

    Each forward registers a parametrization of torch on them, which sets the parameter to itself: a change in place.
    """
    wrappers: list[Any] = [part for part in module.modules() if type(part).__name__ == "ParamWrapper"]
    return {id(wrapper.get_param()) for wrapper in wrappers if type(wrapper).__module__.startswith("peft.")}


_PARAM, _VERSION = itemgetter(1), attrgetter("_version")
_OWNED = attrgetter("_parameters", "_modules")  # of a module
_INSTEAD = (
    "change it inside `with engine.gathered(parameter, modify=True):` (zero.GatheredParameters(parameter, "
    "modifier_rank=0) in lowtide.deepspeed)"
)
_CHANGED = "parameter '{name}' was changed {how}, but its master weights and other ranks do not see it; " + _INSTEAD


class _Modules:
    """The parameters and children of all modules at an earlier time: cheaper to compare than all names."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        tables = chain.from_iterable(map(_OWNED, self._modules))
        are_dicts = all(isinstance(table, dict) for table in tables)  # torch.jit has other objects in their place
        self._values = dict.values if are_dicts else methodcaller("values")  # the latter takes twice as long
        self._held = list(self._members())  # keeps them alive, so that no id is used twice
        self._ids = list(map(id, self._held))

    def have_changed(self) -> bool:
        return list(map(id, self._members())) != self._ids

    def _members(self) -> Iterator[object]:
        """Iterate over the parameters and children of all modules, without a line of Python for each module."""
        return chain.from_iterable(map(self._values, chain.from_iterable(map(_OWNED, self._modules))))
