"""The values kept beside the parameters of a shard: master weights, remainders and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..kernels.optimizer_states import STATE_BLOCK_NUMEL
from ..kernels.weight_rounding import Rounding
from .group import ShardedGroup


class MasterWeights(Enum):
    """The precise value behind a bfloat16 parameter. float16 always has masters; wider dtypes need none.

    | value  | bytes beside 2 | the update computes in float32 and                                     |
    |--------|----------------|------------------------------------------------------------------------|
    | WIDER  | 4              | keeps float32; the parameter is the nearest bfloat16                   |
    | NONE   | 0              | rounds at random: [Note: Numbered draws] in kernels/weight_rounding    |
    | KAHAN  | 2              | keeps the sum of two bfloat16 values: [Note: Remainders], same file    |
    | SPLIT  | 1              | rounds at random to 24 bits: [Note: Split weights], same file          |
    """

    WIDER = "wider"
    NONE = "none"
    KAHAN = "kahan"
    SPLIT = "int8"

    @property
    def is_drawn(self) -> bool:
        """Whether an update of bfloat16 is rounded at random."""
        return self in (MasterWeights.NONE, MasterWeights.SPLIT)

    @property
    def remainder(self) -> tuple[str, torch.dtype] | None:
        """Name and dtype of the state with the missing bits of a bfloat16 parameter, if any."""
        return _REMAINDERS.get(self)

    def are_beside(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype have separate float32 masters."""
        return dtype == torch.float16 or (dtype == torch.bfloat16 and self is MasterWeights.WIDER)


_REMAINDERS = {MasterWeights.KAHAN: ("remainder", torch.bfloat16), MasterWeights.SPLIT: ("correction", torch.int8)}
REMAINDERS = frozenset(name for name, _ in _REMAINDERS.values())
"""States that belong to the parameters' precision, not to the optimizer."""


@dataclass(frozen=True)
class WeightForm:
    """The effect of `MasterWeights` on parameters of a dtype."""

    is_mixed: bool  # parameters are the rounded copy of separate master weights
    master_dtype: torch.dtype
    rounding: Rounding | None  # random bits that round the parameters, if any
    has_remainder: bool  # the last state has the parameters' missing bits

    @classmethod
    def of(cls, group: ShardedGroup, masters: MasterWeights, seed: int) -> WeightForm:
        """Return the form of a group's parameters. seed: of random rounding."""
        dtype = group.plan.dtype
        is_mixed, is_half = masters.are_beside(dtype), dtype == torch.bfloat16
        is_drawn = masters.is_drawn and is_half
        return cls(
            is_mixed=is_mixed,
            master_dtype=torch.float32 if is_mixed else dtype,
            # Counted in the flat buffer, so the draws do not depend on the number of shards.
            rounding=Rounding.of(seed, group.plan.name, group.own.start) if is_drawn else None,
            has_remainder=masters.remainder is not None and is_half,
        )


MASTER = "master"
NewStates = Callable[[Tensor], dict[str, Tensor]]
"""Master weights, (n,) -> the states before the first step, by name."""
Kinds = Mapping[str, tuple[torch.dtype, int]]
"""Name of a state, or "master" -> dtype and number of elements."""


def kinds_of_block(dtype: torch.dtype, masters: MasterWeights, new_states: NewStates) -> Kinds:
    """Return the kinds of states and masters of 256 elements.

    Made from a real block: an operation on the meta device would import 33 MiB of modules.
    """
    is_mixed = masters.are_beside(dtype)
    block = torch.zeros(STATE_BLOCK_NUMEL, dtype=torch.float32 if is_mixed else dtype)
    tensors = {**({MASTER: block} if is_mixed else {}), **new_states(block)}
    return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}


def scaled(kinds: Kinds, numel: int) -> Kinds:
    """Return the kinds for `numel` elements."""
    return {name: (dtype, scaled_numel(of_block, numel)) for name, (dtype, of_block) in kinds.items()}


def scaled_numel(numel_of_block: int, numel: int) -> int:
    """Scale the elements of a tensor from a block of 256 (which has 256, or 1 scale) to `numel`."""
    return -(-numel * numel_of_block // STATE_BLOCK_NUMEL)
