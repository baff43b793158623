"""Notices what a user changes on the model behind the engine's back, before it goes wrong silently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..zero.group import ShardedGroup
from ..zero.plan import Role
from ..zero.unit import Unit


class ModelGuard:
    """Compares the model's parameters with those that the engine knows.

    | what is compared                                  | of which parameters                                        |
    |---------------------------------------------------|------------------------------------------------------------|
    | identity in its place                             | all                                                        |
    | requires_grad                                     | those frozen and in no group of the optimizer              |
    | where its values lie                              | all whose memory is kept                                   |
    | how often it was changed in place                 | those of which masters or other ranks have another copy    |
    | a few of its elements, for what went past `.data` | of those, the ones that can be read between steps          |
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], copies_are_shared: bool, only_steps_change: bool = True
    ) -> None:
        """only_steps_change: parameters change in `engine.step` alone."""
        self._module = module
        groups = [group for unit in units for group in unit.groups]
        members = [(group, name, p) for group in groups for name, p in zip(group.names, group.params, strict=True)]
        self._params = [(name, param) for group, name, param in members if group.role is Role.FROZEN]
        self._known = {id(param): name for _, name, param in members}
        self._kept = [(name, param) for group, name, param in members if not group.frees_memory]
        watched = {id(g) for g in groups if copies_are_shared or g.frees_memory or g.dtype.itemsize < 4}
        self._watched = [(name, param) for group, name, param in members if id(group) in watched]
        self._places = dict(module.named_parameters(remove_duplicate=False))
        self._parts = _parts_of(module)
        readable = [group for group in groups if id(group) in watched and not group.frees_parameters]
        self._updated = [p for group, _, p in members if group.role is not Role.FROZEN]
        grown = set(map(id, self._updated))
        self._grows = [int(id(param) in grown) for _, param in self._watched]
        self._samples = [_Sample(group) for group in readable] if only_steps_change else []
        self.shares_values = copies_are_shared and bool(self._samples)
        """Another rank may change what is remembered here: it must wait until that is done."""
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._values: list[Tensor] | None = None
        self._num_changes = 0
        self.remember()

    def num_changes(self) -> int:
        """A number that grows with each change that the engine itself makes."""
        return self._num_changes

    def remember(self) -> None:
        """Takes the parameters as they are now for right."""
        self._num_changes += 1
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for _, param in self._watched]
            self._addresses = [param.data_ptr() for _, param in self._kept]
        self.remember_values()

    def expect_update(self) -> None:
        """From now on values may change, until they are remembered."""
        self._num_changes += 1
        self._values = None

    def mark_updated(self) -> None:
        """Autograd refuses graphs that have saved parameters before this, as it does after a step of torch's."""
        torch.autograd.graph.increment_version(self._updated)
        self._versions = [version + by for version, by in zip(self._versions, self._grows, strict=True)]

    def remember_values(self) -> None:
        """The step has ended: nobody changes values now."""
        self._values = [sample.take() for sample in self._samples]

    def check(self) -> None:
        """Raises ValueError for parameters that were added, replaced, tied, taken out, unfrozen or changed."""
        if any(part.has_changed() for part in self._parts):
            self._check_places()
        with torch._C.DisableTorchFunctionSubclass():  # reading an attribute of a released one costs a call of Python
            for name, param in self._params:
                if param.requires_grad:
                    raise ValueError(
                        f"parameter '{name}': expected requires_grad=False as at lowtide.initialize, found True; no "
                        "group of the optimizer has it; give it one by engine.optimizer.add_param_group"
                    )
            for (name, param), address in zip(self._kept, self._addresses, strict=True):
                if param.data_ptr() != address:
                    raise ValueError(
                        f"parameter '{name}' got other memory (an assignment to its .data, or .to(), .half(), ...), "
                        f"which is not what is updated and saved; {_INSTEAD}"
                    )
            for (name, param), version in zip(self._watched, self._versions, strict=True):
                if param._version != version:
                    raise ValueError(_CHANGED.format(name=name, how="in place"))
        self._check_values()

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
        self._parts = _parts_of(self._module)

    def _check_values(self) -> None:
        if self._values is None:
            self.remember_values()
            return
        now = [sample.take() for sample in self._samples]
        differs = [(old != new).any() for old, new in zip(self._values, now, strict=True)]
        if differs and bool(torch.stack(differs).any()):  # together: a device is waited for once
            changed = zip(self._samples, self._values, now, strict=True)
            name = next(sample.first_difference(old, new) for sample, old, new in changed if not torch.equal(old, new))
            raise ValueError(_CHANGED.format(name=name, how="through .data"))


_INSTEAD = "change it inside `with engine.gathered(parameter, modify=True):`"
_CHANGED = "parameter '{name}' was changed {how}, which its master weights and other ranks do not see; " + _INSTEAD


class _Part:
    """A module as it was, with its own parameters and children: cheaper to compare than all names are to walk."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._children = list(module._modules.values())  # held, so that their identities are not given to others
        self._param_ids = list(map(id, module._parameters.values()))
        self._child_ids = list(map(id, self._children))

    def has_changed(self) -> bool:
        module = self._module
        return (
            list(map(id, module._parameters.values())) != self._param_ids
            or list(map(id, module._modules.values())) != self._child_ids
        )


def _parts_of(module: nn.Module) -> list[_Part]:
    return [_Part(part) for part in module.modules()]


class _Sample:
    """The bits of four elements of each parameter of a group. A change of whole tensors or first rows shows there."""

    def __init__(self, group: ShardedGroup) -> None:
        slots = [slot for slot in group.layout.slots if slot.numel]
        self._names = [slot.name for slot in slots]
        self._group = group
        self._bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[group.dtype.itemsize]
        places = [
            slot.offset_in_flat + part * (slot.numel - 1) // (_NUM_SAMPLED - 1)
            for slot in slots
            for part in range(_NUM_SAMPLED)
        ]
        self._places = torch.tensor(places, dtype=torch.int64, device=group.full.device)

    def take(self) -> Tensor:
        return self._group.full.index_select(0, self._places).view(self._bits)

    def first_difference(self, old: Tensor, new: Tensor) -> str:
        return self._names[int((old != new).nonzero()[0]) // _NUM_SAMPLED]


_NUM_SAMPLED = 4
