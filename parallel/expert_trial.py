"""Whether experts compute what a split of them takes for granted: looked at once, with the first rows that come.

Rows of other ranks' tokens come here without their weights, each with one choice. So the output for a row must depend
on that row and its expert alone, and be in proportion to the weight. Half of the rows with half of the weight tell.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..model.buffers import BufferValues
from .split_trial import MOST_NARROW, distance_of, random_states


class TriedExperts:
    """The forward of a layer's module, of rows with one choice each. Raises ValueError where it cannot be split."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        self._name = name
        self._module = module
        self._forward = forward
        self._is_tried = False

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        """rows: (rows, width), at least one, experts: (rows,) int64 -> (rows, width), of weight 1."""
        if self._is_tried or rows.is_meta:
            return self._made(rows, experts, 1.0)
        before = random_states(self._module)
        made = self._made(rows, experts, 1.0)
        self._is_tried = True
        if all(map(torch.equal, before, random_states(self._module))):  # else two calls are not alike
            self._try(rows, experts, made.detach())
        return made

    def _made(self, rows: Tensor, experts: Tensor, weight: float) -> Tensor:
        made = self._forward(rows, experts.unsqueeze(1), rows.new_full((len(rows), 1), weight))
        if not isinstance(made, Tensor) or made.shape != rows.shape:
            found = tuple(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise ValueError(
                f"'{self._name}': expected an output of the shape of its input, {tuple(rows.shape)}, found {found}; "
                "its experts cannot be split, set parallel.expert to 1"
            )
        return made.to(rows.dtype)

    def _try(self, rows: Tensor, experts: Tensor, made: Tensor) -> None:
        num = (len(rows) + 1) // 2
        with BufferValues(self._module), torch.no_grad():
            found = distance_of(self._made(rows[:num], experts[:num], 0.5), made[:num] * 0.5)
        if found > MOST_NARROW:
            raise ValueError(
                f"'{self._name}': expected an output for each row of that row and its expert alone, in proportion to "
                f"the weight, found one {found:.0%} of its size off for half of the rows with half of the weight: "
                "write it as the sum over k of weight times what the expert makes of the row, or set parallel.expert "
                "to 1"
            )
