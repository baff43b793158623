"""What a stage will lack, found out on the stage before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .absent import Absent
from .outer_values import Name, OuterValues
from .replay import BLOCK, skipped_output
from .split import SplitPlan
from .trees import TensorShape, leaves, map_leaves


@dataclass(frozen=True)
class Needs:
    """positions: of the arguments of the next stage's first block which it lacks.

    passing: the names of values that it lacks, its first block does not take, and code behind that block needs.
    """

    positions: tuple[int, ...]
    passing: tuple[Name, ...]


class Probe:
    """A forward of the next stage with nothing computed: up to its first block as it will run there.

    From that block on it is a look ahead, in which blocks return what the block before the cut returned, for the names
    of the values that are still needed. It ends where the model needs a value or returns; what it has missed is an
    error on the stage that lacks it.
    """

    def __init__(self, plan: SplitPlan, stage: int, outputs: Sequence[Any], device: torch.device) -> None:
        """outputs: descriptions of what the blocks before the stage returned."""
        self.stage = stage
        self.values = OuterValues()
        self.arguments: tuple[Any, Any] | None = None  # of the first block
        self._names = plan.blocks
        self._first = plan.blocks_of(stage).start
        self._outputs = outputs
        self._device = device

    def call_block(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        """What block `number` is thought to return."""
        if number < self._first and self.arguments is None:
            output = skipped_output(self._outputs[number], self._names[number], self._device, self)
            self.values.keep(BLOCK, number, output)
            return output
        if self.arguments is None:
            self.arguments = (args, kwargs)
            self.values.cut(self.arguments)
        self.values.use((args, kwargs))
        return skipped_output(_like(self._outputs[-1], (args, kwargs)), self._names[number], self._device, self)

    def needs(self) -> Needs:
        """What was found."""
        lacking = [position for position, leaf in enumerate(leaves(self.arguments)) if isinstance(leaf, Absent)]
        return Needs(tuple(lacking), tuple(sorted(self.values.used)))

    def forget(self) -> None:
        """Lets go of the tensors that it has met: absent ones refer to this, so only the garbage collector would, in
        the midst of a later step, whose addresses would move."""
        self.values.values.clear()
        self.arguments = None


def _like(described: Any, arguments: Any) -> Any:
    """The description with the first tensor as large as the first argument: a decoder's block after an encoder's."""
    first = next((leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor)), None)
    pending = [first] if first is not None else []

    def change(leaf: Any) -> Any:
        if isinstance(leaf, TensorShape) and pending:
            return TensorShape(tuple(pending.pop().shape), leaf.dtype)
        return leaf

    return map_leaves(change, described)
