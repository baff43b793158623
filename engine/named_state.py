"""The model's and the optimizer's state by name: which range of which tensor this rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checkpoint.fragment import Fragment, TensorInfo
from ..comm import Mesh
from ..offload import Memory
from ..zero.group import ShardedGroup, part_of, values_of
from ..zero.layout import Piece
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
            slot.name: TensorInfo(slot.shape, self._dtype_of(group))
            for group in self._groups
            for slot in group.layout.slots
        }

    def _dtype_of(self, group: ShardedGroup) -> torch.dtype:
        shard = self._shards.get(id(group))
        return group.dtype if shard is None else shard.master_dtype

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

    def weights(self, rounded: bool = False, changes: bool = False) -> list[Fragment]:
        """What this rank holds of the parameters; rounded: in the dtype in which they are computed.

        changes: they are for writing; what rests in a store is kept there then, changed.
        """
        fragments = []
        for group in self._groups:
            shard = None if rounded else self._shards.get(id(group))
            for piece in group.pieces if shard is None else shard.pieces:
                low = piece.offset_in_shard
                if shard is None:
                    memory = part_of(group.own_values(changes), low, low + piece.numel)
                else:
                    memory = shard.master_of(piece, changes)
                fragments.append(_fragment(group, piece, "", memory))
        return fragments

    def states(self, changes: bool = False) -> list[Fragment]:
        """What this rank holds of the optimizer's elementwise states, named `parameter.state`."""
        return [
            _fragment(shard.group, piece, f".{name}", memory)
            for shard in self._optimizer.shards
            for piece in shard.pieces
            for name, memory in self._optimizer.states_of(shard, piece, changes).items()
        ]

    def divided(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """The part of the fragments that this rank writes, where its replicas hold the same ones."""
        axis = self._mesh.replica
        parts = []
        for fragment in fragments:
            numel = fragment.numel
            low, high = (numel * place // axis.size for place in (axis.rank, axis.rank + 1))
            if low < high:
                parts.append(fragment.part(low, high))
        return parts

    def publish(self) -> None:
        """After weights have changed in place: the computed copies follow, on all ranks. A collective."""
        self._optimizer.settle()
        for shard in self._optimizer.shards:
            for piece in shard.pieces if shard.is_mixed else ():
                low = piece.offset_in_shard
                own = values_of(part_of(shard.group.own_values(changes=True), low, low + piece.numel))
                own.copy_(values_of(shard.master_of(piece)))
        for group in self._groups:
            if group.frees_memory:  # full ones have the other ranks' old values
                group.release()
        pending = [group.refresh() for group in self._groups if not group.frees_memory]
        for one in pending:
            one.wait()
        self._mesh.fence("new parameters")


def _fragment(group: ShardedGroup, piece: Piece, suffix: str, memory: Memory) -> Fragment:
    slot = group.layout.slots[piece.index]
    return Fragment(slot.name + suffix, slot.shape, piece.offset_in_param, memory)
