"""Which forward an attention belongs to: the one that runs, or, in a backward, the one whose block is computed again.

[Note: whose recomputation] Several forwards may be in flight before their backwards, each with a mask of its own. A
block that is recomputed, by whomever, is so while autograd works on a node of its forward. Nodes are numbered as they
are made, so the number says which forward that was. What attention must know of it lives as long as its graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .sequence_data import AttentionContext, SequenceError

_KEY = "lowtide.sequence"


class Forwards:
    """The whole microbatches of the forwards in flight."""

    def __init__(self) -> None:
        self._running: tuple[AttentionContext, int] | None = None  # with the number of its first node
        self._kept: list[
            tuple[int, int, weakref.ref[AttentionContext]]
        ] = []  # numbers of the first node, and of that behind

    def begin(self, whole: AttentionContext) -> None:
        """A forward of this one."""
        self._running = whole, _number()

    def check(self, model: str) -> None:
        """Raises SequenceError where the model was called past the engine."""
        if self._running is None:
            raise SequenceError(
                f"expected engine(**batch), engine.train_step or engine.eval_step, found a call of the {model} itself "
                "(or of its generate()), which has no part of a sequence; generate with an engine of sequence 1"
            )

    def end(self, output: Any) -> None:
        """output: of the forward, whose graph keeps what it was of; None where it was left, and others keep that."""
        if self._running is None:
            return
        (whole, first), self._running = self._running, None
        self._kept = [kept for kept in self._kept if kept[2]() is not None]
        if torch.is_grad_enabled():
            self._kept.append((first, _number(), weakref.ref(whole)))
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                one.grad_fn.metadata[_KEY] = whole  # type: ignore[index]  # torch's stub says method, it is a property

    @property
    def whole(self) -> AttentionContext:
        """Of the attention that is computed now. Raises SequenceError."""
        if torch._C._current_graph_task_id() == -1:
            if self._running is None:
                raise SequenceError("expected attention in a forward of the engine's, found it outside of one")
            return self._running[0]
        alive = [(first, behind, whole) for first, behind, ref in self._kept if (whole := ref()) is not None]
        number = torch._C._current_autograd_node()._sequence_nr()
        for first, behind, whole in alive:
            if first <= number < behind:
                return whole
        if len(alive) == 1:  # a checkpoint inside of a checkpoint, whose nodes are younger
            return alive[0][2]
        raise SequenceError(
            f"a block is recomputed, and which of {len(alive)} forwards in flight it is of cannot be told; use "
            "checkpoint(..., use_reentrant=False), or call engine.backward after each forward"
        )


def _number() -> int:
    """Of the node of autograd that is made next."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number
