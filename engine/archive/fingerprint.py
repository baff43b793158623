"""What tells whether the values of parameters have changed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ...zero.group import Residence, ShardedGroup
from ...zero.layout import PARAM_ALIGNMENT_NUMEL, Slot


class Fingerprint:
    """Of parameters that are full: the place and version of each, and the sum of its bits. It reads them once."""

    def __init__(self, groups: Sequence[ShardedGroup], wanted: Collection[int]) -> None:
        """wanted: identities of the parameters; none: all."""
        self._members = [
            (group, slot, param)
            for group in groups
            for slot, param in zip(group.layout.slots, group.params, strict=True)
            if not wanted or id(param) in wanted
        ]
        self._before = [_mark(*member) for member in self._members]

    def changed(self) -> list[str]:
        """The names of those that are not what they were, but for those that a forward has released since."""
        pairs = zip(self._members, self._before, strict=True)
        return [
            slot.name
            for (group, slot, param), before in pairs
            if group.residence is Residence.FULL and _mark(group, slot, param) != before
        ]


def _mark(group: ShardedGroup, slot: Slot, param: nn.Parameter) -> tuple[int, int, int, bytes]:
    values = group.full[slot.offset_in_flat : slot.end_in_flat]
    whole = slot.numel - slot.numel % PARAM_ALIGNMENT_NUMEL  # where parameters begin, so that words are aligned
    tail: Tensor = values[whole:].view(torch.uint8)
    return param.data_ptr(), param._version, int(values[:whole].view(torch.int64).sum()), bytes(tail.tolist())
