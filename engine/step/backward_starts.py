"""Backwards that begin anywhere in the process, before autograd has come to anything of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...zero.autograd import current_graph_task

Root = Tensor | GradientEdge
Listener = Callable[[Sequence[Root], Sequence[Root] | None], Sequence[Root]]
"""Is given what a backward begins with, and the inputs of a `torch.autograd.grad` (None: of a backward, which adds to
`grad`). Returns what it is to begin with instead."""

_NAME = "_engine_run_backward"  # what torch.autograd.backward and torch.autograd.grad call; Tensor.backward calls those


def listen(listener: Listener) -> Callable[[], None]:
    """Has a bound method told of each backward that is not a part of another one. Returns what ends that.

    The object of the method is not held. torch has no hook at this place, so its function is replaced, as long as
    somebody listens.
    """
    starts = vars(torch.autograd)[_NAME]
    if not isinstance(starts, _Starts):
        starts = vars(torch.autograd)[_NAME] = _Starts(starts)
    reference = weakref.WeakMethod(listener)
    starts.listeners.append(reference)

    def end() -> None:
        starts.listeners.remove(reference)
        if not starts.listeners and vars(torch.autograd)[_NAME] is starts:
            vars(torch.autograd)[_NAME] = starts.run

    return end


class _Starts:
    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.listeners: list[weakref.WeakMethod[Listener]] = []

    def __call__(self, roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
        if current_graph_task() < 0:
            inputs = None if kwargs["accumulate_grad"] else args[3]
            for reference in list(self.listeners):
                listener = reference()
                if listener is not None:
                    roots = listener(roots, inputs)
        return self.run(roots, *args, **kwargs)
