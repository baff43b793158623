"""Notices what a user changes on the model behind the engine's back, before it goes wrong silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...zero.group import ShardedGroup
from ...zero.plan import Role
from ..blueprint.blueprint import Timing
from .features import StepFeature
from .parts import Parts

_NUM_SAMPLED = 4  # of a parameter
_Look = tuple[list[Tensor], list[Tensor]]
"""Values as they were remembered, and as they were found: where several times, the first that were others."""


class ParameterFingerprints:
    """Tells which parameter of the groups has changed since. Where they are on a device, the host does not wait."""

    def __init__(self, groups: Sequence[ShardedGroup]) -> None:
        dtypes = dict.fromkeys(group.plan.dtype for group in groups)
        self._samples = [_Samples([group for group in groups if group.plan.dtype == dtype]) for dtype in dtypes]
        self._values: list[Tensor] | None = None
        self._memory: list[Tensor] = []  # of the values that were remembered last
        self._seen: Tensor | None = None  # () bool on a device: a value was found changed there
        self._looks: list[_Look] = []
        self._told: list[_Look] = []  # those of which `take_changed` has told

    def __len__(self) -> int:
        """Of how many dtypes they are."""
        return len(self._samples)

    def remember(self) -> None:
        """The step has ended: nobody changes values now."""
        self._told = []
        is_looked_at = self._looks and any(values is self._memory for values, _ in self._looks)
        if self._samples and (is_looked_at or not self._memory):
            with torch.inference_mode(False):  # it is written to later
                self._memory = [sample.take() for sample in self._samples]
        else:  # at the addresses of the last step, so that what is taken beside them has its own again as well
            for sample, out in zip(self._samples, self._memory, strict=True):
                sample.take(out)
        self._values = self._memory

    def expect_update(self) -> None:
        """From now on they may change, until they are remembered."""
        self._values = None

    def changed(self) -> str:
        """The name of a parameter that has changed; "" where there is none, and on a device: `take_changed` tells."""
        if not self._samples:
            return ""
        if self._values is None:
            self.remember()
            return ""
        now = [sample.take() for sample in self._samples]
        differs = [(old != new).any() for old, new in zip(self._values, now, strict=True)]
        if not differs:
            return ""
        if differs[0].device.type == "cpu":
            return self._first_difference(self._values, now) if any(map(bool, differs)) else ""
        if self._looks and self._looks[-1][0] is self._values:  # one look, however many microbatches a step has
            _, earlier = self._looks.pop()
            changed = zip(self._values, earlier, now, strict=True)
            now = [torch.where(then != old, then, last) for old, then, last in changed]
        self._looks.append((self._values, now))
        differs += [] if self._seen is None else [self._seen]
        self._seen = torch.stack(differs).any()
        return ""

    def take_changed(self) -> Tensor | None:
        """() bool on a device: `changed` has found a changed value there since this was asked last.

        The host need not know before the step ends. None where nothing was looked at, and on the CPU, where it knows.
        """
        seen, self._seen = self._seen, None
        self._told, self._looks = self._looks, []
        return seen

    def changed_name(self) -> str:
        """The name of a parameter of which `take_changed` has told last, or ""; the host waits."""
        for old, new in self._told:
            if name := self._first_difference(old, new):
                self._values = old  # the next step is not to take it for right
                return name
        return ""

    def _first_difference(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> str:
        for sample, before, now in zip(self._samples, old, new, strict=True):
            if not torch.equal(before, now):
                return sample.first_difference(before, now)
        return ""


class _Samples:
    """The bits of some elements of each parameter of a dtype. A change of whole tensors or first rows shows there."""

    def __init__(self, groups: Sequence[ShardedGroup]) -> None:
        self._bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[groups[0].plan.dtype.itemsize]
        param_views = [
            (group.full, param_view) for group in groups for param_view in group.layout.param_views if param_view.numel
        ]
        self._views = [
            full[param_view.offset_in_flat : param_view.end_in_flat][
                :: max(1, (param_view.numel - 1) // (_NUM_SAMPLED - 1))
            ]
            for full, param_view in param_views
        ]
        self._names = [
            param_view.name for (_, param_view), view in zip(param_views, self._views, strict=True) for _ in view
        ]

    def take(self, out: Tensor | None = None) -> Tensor:
        """out: of an earlier time, that is written to."""
        if out is None:
            return torch.cat(self._views).view(self._bits)
        torch.cat(self._views, out=out.view(self._views[0].dtype))
        return out

    def first_difference(self, old: Tensor, new: Tensor) -> str:
        return self._names[int((old != new).nonzero()[0])]


class ModelGuard(StepFeature):
    """Compares the model's parameters with those that the engine knows.

    | what is compared                                  | of which parameters                                        |
    |---------------------------------------------------|------------------------------------------------------------|
    | identity in its place                             | all                                                        |
    | requires_grad                                     | those frozen and in no group of the optimizer              |
    | where its values lie                              | all whose memory is kept                                   |
    | how often it was changed in place                 | those of which masters or other ranks have another copy    |
    | a few of its elements, for what went past `.data` | of those, the ones that can be read between steps          |
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._module = parts.module
        self._mesh = parts.mesh
        self.after_new_groups()

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def after_new_groups(self) -> None:
        groups = [group for unit in self._parts.runner.passes.units for group in unit.groups]
        copies_are_shared = any(group.axes.copies_are_shared for group in groups)
        only_steps_change = Timing.of(self._parts.config) is not Timing.DELAYED
        members = [(group, name, p) for group in groups for name, p in group.plan.params]
        self._params = [(name, param) for group, name, param in members if group.plan.role is Role.FROZEN]
        self._known = {id(param): name for _, name, param in members}
        self._kept = [(name, param) for group, name, param in members if not group.frees_memory]
        watched = {id(g) for g in groups if copies_are_shared or g.frees_memory or g.plan.dtype.itemsize < 4}
        self._watched = [(name, param) for group, name, param in members if id(group) in watched]
        self._places = dict(self._module.named_parameters(remove_duplicate=False))
        self._modules = _Modules(self._module)
        readable = [group for group in groups if id(group) in watched and not group.plan.sharding.parameters]
        self._updated = [p for group, _, p in members if group.plan.role is not Role.FROZEN]
        grown = set(map(id, self._updated))
        self._grows = [int(id(param) in grown) for _, param in self._watched]
        self.values = ParameterFingerprints(readable if only_steps_change else ())
        # Whether another rank may change what is remembered here: it must wait until that is done.
        self._shares_values = copies_are_shared and len(self.values) > 0
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self.after_change()

    def after_change(self) -> None:
        """Takes the parameters as they are now for right."""
        self.values.expect_update()
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = _versions(self._watched)
            self._addresses = _addresses(self._kept)
        self.values.remember()

    def before_update(self) -> None:
        self.values.expect_update()
        if (seen := self.values.take_changed()) is not None:
            self._parts.steps.accumulated.note_inconsistency(self, seen)

    def after_update(self, skipped: bool) -> None:
        """Autograd refuses graphs that have saved parameters before this, as it does after a step of torch's."""
        if not skipped:
            torch.autograd.graph.increment_version(self._updated)
            self._versions = [version + by for version, by in zip(self._versions, self._grows, strict=True)]
        self.values.remember()
        if self._shares_values:  # else a rank that is ahead may change what this one remembers
            self._mesh.fence("the end of a step")

    def after_refresh(self) -> None:
        self.values.remember()

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Raises ValueError for parameters that were added, replaced, tied, taken out, unfrozen or changed."""
        if self._modules.have_changed():
            self._check_places()
        with torch._C.DisableTorchFunctionSubclass():  # reading an attribute of a released one costs a call of Python
            for name, param in self._params:
                if param.requires_grad:
                    raise ValueError(
                        f"parameter '{name}': expected requires_grad=False as at lowtide.initialize, found True; no "
                        "group of the optimizer has it; give it one by engine.optimizer.add_param_group"
                    )
            addresses, versions = _addresses(self._kept), _versions(self._watched)
        if addresses != self._addresses:
            raise ValueError(
                f"parameter '{_first_other(self._kept, addresses, self._addresses)}' got other memory (an assignment "
                f"to its .data, or .to(), .half(), ...), which is not what is updated and saved; {_INSTEAD}"
            )
        if versions != self._versions:
            name = _first_other(self._watched, versions, self._versions)
            raise ValueError(_CHANGED.format(name=name, how="in place"))
        if name := self.values.changed():
            raise ValueError(_CHANGED.format(name=name, how=_THROUGH_DATA))

    def explain_inconsistency(self) -> None:
        """Raises ValueError on all ranks, for what `values.take_changed` has told of on any. A collective."""
        name = self.values.changed_name()
        own = _CHANGED.format(name=name, how=_THROUGH_DATA) if name else ""
        if found := [text for text in self._mesh.world.gather_objects(own) if text]:
            raise ValueError(found[0])

    def _check_places(self) -> None:
        """As `check`, of which parameter is where; then takes the modules as they are now for right."""
        found = dict(self._module.named_parameters(remove_duplicate=False))
        for name, param in found.items():
            if id(param) not in self._known:
                raise ValueError(
                    f"parameter '{name}' was added or replaced after lowtide.initialize, which does not know it; "
                    "change the model first, then call initialize again"
                )
            if self._places.get(name, param) is not param:
                raise ValueError(
                    f"parameter '{name}' was tied to '{self._known[id(param)]}' after "
                    "lowtide.initialize, and what it was before "
                    "would still be updated and saved; tie them first, then call initialize again"
                )
        present = {id(param) for param in found.values()}
        gone = next((name for name, param in self._places.items() if id(param) not in present), None)
        if gone is not None:
            raise ValueError(
                f"parameter '{gone}' was taken out of the model after lowtide.initialize, and would still be updated "
                "and saved; change the model first, then call initialize again"
            )
        self._modules = _Modules(self._module)


def _addresses(params: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
    return list(map(Tensor.data_ptr, map(_PARAM, params)))


def _versions(params: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
    return list(map(_VERSION, map(_PARAM, params)))


def _first_other(params: Sequence[tuple[str, nn.Parameter]], found: Sequence[int], expected: Sequence[int]) -> str:
    return next(name for (name, _), a, b in zip(params, found, expected, strict=True) if a != b)


_PARAM, _VERSION = itemgetter(1), attrgetter("_version")
_OWNED = attrgetter("_parameters", "_modules")  # of a module
_INSTEAD = (
    "change it inside `with engine.gathered(parameter, modify=True):` (zero.GatheredParameters(parameter, "
    "modifier_rank=0) in lowtide.deepspeed)"
)
_CHANGED = "parameter '{name}' was changed {how}, which its master weights and other ranks do not see; " + _INSTEAD
_THROUGH_DATA = "through .data"


class _Modules:
    """Modules as they were, with their own parameters and children: cheaper to compare than all names are to walk."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        are_dicts = all(isinstance(one, dict) for one in self._owned())  # torch.jit has something else in their place
        self.values = dict.values if are_dicts else methodcaller("values")  # which takes twice as long
        self._held = list(self._members())  # so that their identities are not given to others
        self._ids = list(map(id, self._held))

    def have_changed(self) -> bool:
        return list(map(id, self._members())) != self._ids

    def _members(self) -> Iterator[object]:
        """No line of Python for each module, of which a model has some hundreds."""
        return chain.from_iterable(map(self.values, self._owned()))

    def _owned(self) -> Iterator[Any]:
        return chain.from_iterable(map(_OWNED, self._modules))
