"""What stands beside parameters that are computed in half precision, so that small updates are not lost."""

from __future__ import annotations

from enum import Enum

import torch


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
