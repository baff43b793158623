"""How many steps an optimizer has made, and of which each parameter was a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn


class StepCounts:
    """Steps of all parameters, and those that some of them have missed.

    begin  ...  count       counted from `begin` on
    begin  ...  uncount     there was none
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.is_in_step = False
        """Counted, of which not all shards are updated yet."""
        self.unused: frozenset[int] = frozenset()
        """Identities of the parameters that the step under way, or the last one, leaves as they are: without a gradient
        on any rank."""
        self.missed: Counter[int] = Counter()
        """Identity of a parameter -> the number of steps that left it so."""

    def begin(self) -> None:
        """One more, until `uncount` says that it was none."""
        self.num_steps += 1
        self.is_in_step = True

    def count(self) -> None:
        """What was updated in the step that was begun counts."""
        self.is_in_step = False
        if self.unused:
            self.missed.update(self.unused)

    def uncount(self) -> None:
        """In the step that was begun nothing has changed."""
        self.num_steps -= 1
        self.is_in_step = False

    def take_up(self, params: Iterable[nn.Parameter]) -> None:
        """These have made no step yet."""
        if self.num_steps:
            self.missed.update({id(param): self.num_steps for param in params})

    def load(self, num_steps: int, missed: Mapping[int, int]) -> None:
        """Those of another run."""
        self.num_steps = num_steps
        self.missed = Counter({key: count for key, count in missed.items() if count})
