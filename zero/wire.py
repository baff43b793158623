"""In how many bits weights and gradients go between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm import Arrangement
from .domain import Domain

QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Wire:
    """The bits of a value in messages; None: its own dtype. See [Note: Quantized blocks] in kernels/quantized_blocks.

    | messages                                         | bits                                                |
    |--------------------------------------------------|-----------------------------------------------------|
    | weights, when they are gathered or refreshed     | `weights`; `frozen`, of those that are not trained  |
    | gradients, over axes that leave a host           | `gradients`                                         |
    | gradients, over axes within one                  | `gradients_in_host`                                 |

    Where parameters stay (stages 1 and 2, hpZ) what an update has changed is sent, and gathers within the groups of hpZ
    send weights as they are. Sources: qwZ, qgZ and hpZ of ZeRO++, arXiv 2306.10209; weight differences and two levels
    of gradients of SDP4Bit, arXiv 2410.15526.
    """

    weights: int | None = None
    frozen: int | None = None
    gradients: int | None = None
    gradients_in_host: int | None = None
    ranks_of_host: int = 1

    def is_in_host(self, arrangement: Arrangement, names: tuple[str, ...]) -> bool:
        """Whether ranks that differ on these axes alone are on one host: hosts have ranks one after the other."""
        return arrangement.reach(names) < self.ranks_of_host

    def gradient_bits(self, arrangement: Arrangement, names: tuple[str, ...], dtype: torch.dtype) -> int | None:
        """Of a gradient of that dtype, over these axes."""
        if dtype not in QUANTIZED_DTYPES or self.gradients is None:
            return None
        return self.gradients_in_host if self.is_in_host(arrangement, names) else self.gradients

    def weight_bits(self, arrangement: Arrangement, domain: Domain, dtype: torch.dtype, is_frozen: bool) -> int | None:
        """Of weights of that dtype, where any are sent."""
        sent = domain.refreshed if arrangement.size(domain.refreshed) > 1 else domain.parameters
        if dtype not in QUANTIZED_DTYPES or arrangement.size(sent) == 1:
            return None
        return self.frozen if is_frozen and self.frozen is not None else self.weights


PLAIN = Wire()
