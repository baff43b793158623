"""The model's and the optimizer's state by name: which range of which tensor this rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checkpoint.fragment import Fragment, TensorInfo
from ..comm import Mesh
from ..zero.group import ShardedGroup
from ..zero.optimizer import ShardedOptimizer
from ..zero.sequence import Unit


class NamedState:
    """Parameters, buffers and optimizer states as fragments: views of this rank's shards, nothing is gathered.

    Names are the model's own; a tied parameter goes by its first name, the others are in `aliases`. A parameter that
    is computed in half precision is its float32 master weight here, of which the half is the rounded copy.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        self._module = module
        self._groups = [group for unit in units for group in unit.groups]
        self._shards = {id(shard.group): shard for shard in optimizer.shards}
        self._optimizer = optimizer
        self._mesh = mesh

    @property
    def parameters(self) -> dict[str, TensorInfo]:
        """Every parameter once, in the order of the units: its shape, and the dtype of its most precise copy."""
        return {
            slot.name: TensorInfo(slot.shape, self._weights_of(group).dtype)
            for group in self._groups
            for slot in group.layout.slots
        }

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by name."""
        return {
            name: param
            for shard in self._optimizer.shards
            for name, param in zip(shard.group.names, shard.group.params, strict=True)
        }

    @property
    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each parameter is computed."""
        return {slot.name: group.dtype for group in self._groups for slot in group.layout.slots}

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters -> the first name."""
        first = {
            id(param): name for group in self._groups for name, param in zip(group.names, group.params, strict=True)
        }
        names = self._module.state_dict(keep_vars=True)
        return {
            name: first[id(value)] for name, value in names.items() if id(value) in first and first[id(value)] != name
        }

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers, the very tensors."""
        state = self._module.state_dict(keep_vars=True)
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        }

    def weights(self, rounded: bool = False) -> list[Fragment]:
        """What this rank holds of the parameters; rounded: in the dtype in which they are computed."""
        fragments = []
        for group in self._groups:
            values = group.shard if rounded else self._weights_of(group)
            for piece in group.pieces:
                slot, place = group.layout.slots[piece.index], piece.offset_in_shard
                fragments.append(
                    Fragment(slot.name, slot.shape, piece.offset_in_param, values[place : place + piece.numel])
                )
        return fragments

    def states(self) -> list[Fragment]:
        """What this rank holds of the optimizer's elementwise states, named `parameter.state`."""
        return [
            Fragment(f"{slot.name}.{name}", slot.shape, piece.offset_in_param, values)
            for shard in self._optimizer.shards
            for piece in shard.group.pieces
            for slot in (shard.group.layout.slots[piece.index],)
            for name, values in self._optimizer.states_of(shard, piece).items()
        ]

    def divided(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """The part of the fragments that this rank writes, where its replicas hold the same ones."""
        axis = self._mesh.replica
        parts = []
        for fragment in fragments:
            numel = fragment.values.numel()
            low, high = (numel * place // axis.size for place in (axis.rank, axis.rank + 1))
            if low < high:
                parts.append(Fragment(fragment.name, fragment.shape, fragment.start + low, fragment.values[low:high]))
        return parts

    def publish(self) -> None:
        """After weights have changed in place: the computed copies follow, on all ranks. A collective."""
        for group in self._groups:
            weights = self._weights_of(group)
            if weights is not group.shard:
                group.shard.copy_(weights)
        pending = [group.refresh() for group in self._groups if not group.frees_memory]
        for one in pending:
            one.wait()
        self._mesh.fence("new parameters")

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _weights_of(self, group: ShardedGroup) -> Tensor:
        """(shard_numel,): the master weights, or the shard where there are none."""
        shard = self._shards.get(id(group))
        return group.shard if shard is None else shard.master
