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
    """

    WIDER = "wider"
    NONE = "none"
    KAHAN = "kahan"

    def are_beside(self, dtype: torch.dtype) -> bool:
        """Whether parameters of the dtype are updated in float32 masters, and rounded from these."""
        return dtype == torch.float16 or (dtype == torch.bfloat16 and self is Masters.WIDER)
