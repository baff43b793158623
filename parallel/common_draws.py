"""Modules of a stack that all ranks compute alike, and that draw random numbers.

[Note: random numbers that are the same]
In a stack each rank draws numbers of its own. A module that all ranks compute alike must draw the same ones on all of
them, and in its recomputation again. So it begins at a seed of its own, made of one that was drawn in front of the
stack, where ranks draw the same, and that is kept beside the length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..model.ledger import Ledger
from .randomness import Randomness


class CommonDraws:
    """Has each of them begin at a seed of its own, and the rank's own numbers go on behind it."""

    def __init__(self, randomness: Randomness, is_off: Callable[[], bool]) -> None:
        """is_off: whether blocks compute with all tokens, where all ranks draw alike anyway."""
        self._randomness, self._is_off = randomness, is_off
        self._num = 0
        self._own: list[Tensor] | None = None  # states of this rank's generators, while such a module runs

    def __len__(self) -> int:
        return self._num

    def put_on(self, module: nn.Module, seed: Callable[[], int], ledger: Ledger) -> None:
        """seed: of the stack's forward that runs, or is computed again."""
        self._num += 1
        ledger.hook(module.register_forward_pre_hook(partial(self._enter, self._num, seed)))
        ledger.hook(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, number: int, seed: Callable[[], int], module: nn.Module, args: object) -> None:
        if module.training and not self._is_off():
            self._own = self._randomness.states()
            self._randomness.seed(seed(), -number)

    def _leave(self, *_: object) -> None:
        if self._own is not None:
            self._randomness.restore(self._own)
            self._own = None
