"""What torch is doing right now: the only place that asks autograd's engine, and the transforms of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the run of autograd's engine in which the caller is, the innermost one; -1 outside of any."""


class GraphTask:
    """A run of autograd's engine (a backward, or a `torch.autograd.grad`) that was heard of while it runs.

    Autograd holds it until that run has ended, whether or not with an error: a weak reference to it says so. Runs
    inside of it (reentrant checkpointing, a hook that differentiates something) are others.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        """on_end: called when it has ended without an error, in its own thread."""
        self.number = current_graph_task()
        self._on_end = on_end
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._on_end()


def accumulators_of(params: Iterable[nn.Parameter]) -> dict[int, Node]:
    """What adds up the gradient of each parameter in every graph, by the parameter's identity."""
    found = {}
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        for param in params:
            is_frozen = not param.requires_grad
            try:
                found[id(param)] = get_gradient_edge(param.requires_grad_()).node
            finally:
                if is_frozen:
                    param.requires_grad_(False)
    return found


def will_run(nodes: Iterable[Node]) -> bool:
    """Whether the current run comes to any of these accumulators, to add to what is in `grad`.

    It adds nothing for a parameter whose `requires_grad` was switched off since its forward.
    """
    executes = torch._C._will_engine_execute_node
    try:
        return any(node.variable.requires_grad and executes(node) for node in nodes)  # type: ignore[attr-defined]
    except RuntimeError:  # a torch.autograd.grad which returns the gradient of one of them, and adds it to nothing
        return False


_functorch = torch._C._functorch
current_transform: Callable[[], object | None] = _functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` in which the caller is; None outside of any."""
T = TypeVar("T")


def untransformed(action: Callable[[], T]) -> T:
    """Calls it with plain torch's operations: a view that `grad` has made cannot become a parameter's memory."""
    if current_transform() is None:
        return action()
    with temporarily_clear_interpreter_stack():
        return action()


def at_all_levels(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Each tensor, and what transforms have wrapped in it: a backward may come to any of these."""
    return tensors if current_transform() is None else _with_wrapped(tensors)


def _with_wrapped(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
            yield tensor
