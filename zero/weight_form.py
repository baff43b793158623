"""In which numbers the weights of a shard are updated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.weight_rounding import Rounding
from .group import ShardedGroup
from .masters import Masters


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
