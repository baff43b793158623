"""What is kept beside the parameters of a shard: master weights, remainders, and states of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..kernels.optimizer_states import STATE_BLOCK_NUMEL
from ..kernels.weight_rounding import Rounding
from .group import ShardedGroup


class Masters(Enum):
    """What of a parameter in bfloat16 an update adds to. Those in float16 have masters; wider ones need none.

    | value  | bytes of each element, beside 2 | an update is computed in float32 and                                 |
    |--------|---------------------------------|----------------------------------------------------------------------|
    | WIDER  | 4                               | kept in float32; the parameter is the nearest bfloat16               |
    | NONE   | 0                               | rounded at random: [Note: Numbered draws] in kernels/weight_rounding |
    | KAHAN  | 2                               | kept in two numbers of bfloat16, whose sum it is: [Note: Remainders] |
    | SPLIT  | 1                               | rounded at random to 24 bits: [Note: Split weights], same file       |
    """

    WIDER = "wider"
    NONE = "none"
    KAHAN = "kahan"
    SPLIT = "int8"

    @property
    def is_drawn(self) -> bool:
        """Whether an update of bfloat16 is rounded at random."""
        return self in (Masters.NONE, Masters.SPLIT)

    @property
    def remainder(self) -> tuple[str, torch.dtype] | None:
        """Name and dtype of the state that has what a parameter in bfloat16 lacks; none where nothing has it."""
        return _REMAINDERS.get(self)

    def are_beside(self, dtype: torch.dtype) -> bool:
        """Whether parameters of the dtype are updated in float32 masters, and rounded from these."""
        return dtype == torch.float16 or (dtype == torch.bfloat16 and self is Masters.WIDER)


_REMAINDERS = {Masters.KAHAN: ("remainder", torch.bfloat16), Masters.SPLIT: ("correction", torch.int8)}
REMAINDERS = frozenset(name for name, _ in _REMAINDERS.values())
"""Of the states that belong to the form of the parameters, and not to the optimizer."""


@dataclass(frozen=True)
class WeightForm:
    """What `Masters` come to for parameters of one dtype."""

    is_mixed: bool  # master weights are beside the parameters, which are their rounded copy
    master_dtype: torch.dtype
    rounding: Rounding | None  # what the parameters are rounded with, where that is at random
    has_remainder: bool  # the last of the states is what the parameters lack

    @classmethod
    def of(cls, group: ShardedGroup, masters: Masters, seed: int) -> WeightForm:
        """seed: of what is rounded at random."""
        dtype = group.plan.dtype
        is_mixed, is_half = masters.are_beside(dtype), dtype == torch.bfloat16
        is_drawn = masters.is_drawn and is_half
        return cls(
            is_mixed=is_mixed,
            master_dtype=torch.float32 if is_mixed else dtype,
            rounding=Rounding.of(seed, group.plan.name, group.own.start) if is_drawn else None,
            has_remainder=masters.remainder is not None and is_half,
        )


MASTER = "master"
NewStates = Callable[[Tensor], dict[str, Tensor]]
"""Master weights, (n,) -> the states before the first step, by name."""
Kinds = Mapping[str, tuple[torch.dtype, int]]
"""Name of a tensor of states, or "master" -> its dtype and number of elements."""


def kinds_of_block(dtype: torch.dtype, masters: Masters, new_states: NewStates) -> Kinds:
    """What is kept of a block of 256 elements beside their parameters, which are of the dtype.

    Seen on a block: an operation on a tensor of the meta device would import 33 MiB of modules.
    """
    is_mixed = masters.are_beside(dtype)
    block = torch.zeros(STATE_BLOCK_NUMEL, dtype=torch.float32 if is_mixed else dtype)
    tensors = {**({MASTER: block} if is_mixed else {}), **new_states(block)}
    return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}


def scaled(kinds: Kinds, numel: int) -> Kinds:
    """What is kept of so many elements."""
    return {name: (dtype, scaled_numel(of_block, numel)) for name, (dtype, of_block) in kinds.items()}


def scaled_numel(numel_of_block: int, numel: int) -> int:
    """How many elements a tensor has of which a block of 256 has numel_of_block: 256, or 1 for scales."""
    return -(-numel * numel_of_block // STATE_BLOCK_NUMEL)
