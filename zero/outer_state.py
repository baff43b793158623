"""What islands remember between two exchanges, divided over the ranks of an island as master weights are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..offload import bytes_in_memory, huge_zeros
from .layout import Piece
from .shard_state import ShardState

SYNCED, MOMENTUM, ARRIVED = "synced", "momentum", "arrived"


@dataclass(frozen=True)
class OuterRule:
    """SGD on what the islands have become, as torch.optim.SGD has it; momentum 0: none.

    gradient = mean over islands of (synced - parameters)
    buffer = momentum * buffer + gradient;    synced -= lr * (gradient + momentum * buffer, or the buffer itself)
    Source: DiLoCo, arXiv 2311.08105, algorithm 1.
    """

    lr: float
    momentum: float
    is_nesterov: bool

    def update(self, synced: Tensor, buffer: Tensor | None, gradient: Tensor) -> None:
        """All (n,). `gradient` is used up."""
        if buffer is None:
            synced.add_(gradient, alpha=-self.lr)
            return
        buffer.mul_(self.momentum).add_(gradient)
        synced.add_(gradient.add_(buffer, alpha=self.momentum) if self.is_nesterov else buffer, alpha=-self.lr)


class OuterState:
    """Of each element of this rank's shards, float32 or the wider type of its master weight:

    | name     | what                                                     | when         |
    |----------|----------------------------------------------------------|--------------|
    | synced   | what all islands have agreed on, the same bits on all    | always       |
    | momentum | of the outer optimizer, the same bits on all             | where it has |
    | arrived  | the mean that an exchange has given, not taken over yet  | with overlap |
    """

    def __init__(self, fragments: Sequence[Sequence[ShardState]], rule: OuterRule, on_host: bool) -> None:
        """fragments: what is exchanged together. on_host: in host memory; else beside the master weights."""
        self.fragments = fragments
        self._rule = rule
        self._on_host = on_host
        shards = [shard for fragment in fragments for shard in fragment]
        self._values = {SYNCED: {id(shard): self._memory_for(shard) for shard in shards}}
        if rule.momentum:
            self._values[MOMENTUM] = {id(shard): self._memory_for(shard) for shard in shards}

    def held(self) -> Iterator[Tensor]:
        """With the model, or on the host."""
        return (values for kept in self._values.values() for values in kept.values() if values is not None)

    @property
    def nbytes(self) -> int:
        """With the model."""
        return self._bytes(on_host=False)

    @property
    def host_nbytes(self) -> int:
        """In host memory, where the model is elsewhere."""
        return self._bytes(on_host=True)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of what is kept now."""
        return tuple(self._values)

    def of(self, kind: str, shard: ShardState, piece: Piece) -> Tensor | None:
        """Of a piece of the shard, (piece.numel,); None where there is none."""
        values = self._values.get(kind, {}).get(id(shard))
        return None if values is None else values[piece.offset_in_shard : piece.offset_in_shard + piece.numel]

    def differences(self, fragment: int) -> Tensor:
        """(n,) on the CPU, of its shards one after the other: what was agreed on - the master weights of now.

        Where weights are narrower, it is what was agreed on as they had it: rounded.
        """
        found = [torch.empty(0)]
        for shard in self.fragments[fragment]:
            synced = self._values[SYNCED][id(shard)]
            for start, master in shard.masters():
                agreed = synced[start : start + master.numel()]
                found.append((agreed.to(master.dtype).to(agreed.dtype) - master.to(agreed)).cpu())
        return torch.cat(found)

    def update(self, fragment: int, mean: Tensor) -> None:
        """mean: (n,), of `differences` over the islands."""
        for shard, gradient in self._split(fragment, mean):
            synced = self._values[SYNCED][id(shard)]
            buffer = self._values[MOMENTUM][id(shard)] if MOMENTUM in self._values else None
            self._rule.update(synced, buffer, gradient.to(synced, copy=True))

    def put_back(self, fragment: int, mixing: float) -> None:
        """Master weights become mixing x themselves + (1 - mixing) x what was agreed on; others have to follow."""
        for shard in self.fragments[fragment]:
            for start, master in shard.masters(changes=True):
                agreed = self._values[SYNCED][id(shard)][start : start + master.numel()].to(master.device)
                master.copy_(torch.lerp(agreed, master.to(agreed.dtype), mixing) if mixing else agreed)

    def begin(self) -> None:
        """What was agreed on are the master weights of now, and nothing has moved."""
        for shard in (shard for fragment in self.fragments for shard in fragment):
            for start, master in shard.masters():
                self._values[SYNCED][id(shard)][start : start + master.numel()].copy_(master)
        self.drop_arrived()
        self.rest()

    def rest(self) -> None:
        """Nothing has moved."""
        for values in self._values.get(MOMENTUM, {}).values():
            values.zero_()

    def agreed(self, fragment: int) -> Tensor:
        """(n,) on the CPU: what was agreed on."""
        return self._together(SYNCED, fragment)

    def agree(self, fragment: int, values: Tensor) -> None:
        """values: (n,), what is agreed on from now on."""
        for shard, part in self._split(fragment, values):
            self._values[SYNCED][id(shard)].copy_(part)

    def keep_arrived(self, fragment: int, mean: Tensor) -> None:
        """For a checkpoint, until `drop_arrived`."""
        self.expect_arrived(fragment)
        for shard, part in self._split(fragment, mean):
            self._values[ARRIVED][id(shard)].copy_(part)

    def expect_arrived(self, fragment: int) -> None:
        """Takes memory for what a checkpoint has."""
        kept = self._values.setdefault(ARRIVED, {})
        kept.update({id(shard): self._memory_for(shard) for shard in self.fragments[fragment]})

    def arrived(self, fragment: int) -> Tensor:
        """(n,) on the CPU, as it was kept."""
        return self._together(ARRIVED, fragment)

    def drop_arrived(self) -> None:
        self._values.pop(ARRIVED, None)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _memory_for(self, shard: ShardState) -> Tensor:
        dtype = torch.promote_types(shard.form.master_dtype, torch.float32)
        is_here = not (self._on_host or shard.is_apart)
        device = shard.group.shard.device if is_here else torch.device("cpu")
        return huge_zeros(shard.group.layout.shard_numel, dtype, device)

    def _bytes(self, on_host: bool) -> int:
        shards = [shard for fragment in self.fragments for shard in fragment]
        pairs = ((shard.group.shard.device, kept.get(id(shard))) for kept in self._values.values() for shard in shards)
        found = ((device != values.device, bytes_in_memory(values)) for device, values in pairs if values is not None)
        return sum(nbytes for is_elsewhere, nbytes in found if is_elsewhere is on_host)

    def _together(self, kind: str, fragment: int) -> Tensor:
        return torch.cat([torch.empty(0), *(self._values[kind][id(one)].cpu() for one in self.fragments[fragment])])

    def _split(self, fragment: int, values: Tensor) -> Iterator[tuple[ShardState, Tensor]]:
        start = 0
        for shard in self.fragments[fragment]:
            numel = shard.group.layout.shard_numel
            yield shard, values[start : start + numel]
            start += numel
