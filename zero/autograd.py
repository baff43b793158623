"""The state of autograd's engine and of `torch.func` transforms. No other file asks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the innermost run of autograd's engine around the caller; -1: none."""


class GraphTask:
    """A run of autograd's engine (a backward or a `torch.autograd.grad`) that was noticed while it runs.

    Autograd holds it until the run ends, with or without an error, so a weak reference to it tells when. Nested runs
    (reentrant checkpointing, a hook that differentiates) are separate runs.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        """on_end: called in autograd's thread when the run has ended without an error."""
        self.number = current_graph_task()
        self._on_end = on_end
        # The bound method holds this object. If an error ends the run, autograd drops the callback uncalled.
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._on_end()


def accumulators_of(params: Iterable[nn.Parameter]) -> dict[int, Node]:
    """Return the autograd node that accumulates each parameter's gradient, by id of the parameter."""
    found = {}
    # A tensor refers to its accumulator weakly: if nobody held the node, the next graph would make another.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        for param in params:
            is_frozen = not param.requires_grad
            try:
                # A frozen parameter has an accumulator too, for the case that it is unfrozen later.
                found[id(param)] = get_gradient_edge(param.requires_grad_()).node
            finally:
                if is_frozen:
                    param.requires_grad_(False)
    return found


def forget_accumulators(params: Iterable[nn.Parameter]) -> None:
    """Let the next graph make these nodes anew, even if an earlier graph lives: that of a loss that a block keeps."""
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            values, other = param.data, torch.float32 if param.dtype == torch.float64 else torch.float64
            param.data = values.new_empty(0, dtype=other)  # values of another dtype: torch drops its reference
            param.data = values


def will_run(nodes: Iterable[Node]) -> bool:
    """Whether the current run reaches any of these accumulators and adds to `grad`.

    It adds nothing if the parameter's `requires_grad` was switched off since its forward.
    """
    executes = torch._C._will_engine_execute_node
    try:
        return any(node.variable.requires_grad and executes(node) for node in nodes)  # type: ignore[attr-defined]
    except RuntimeError:  # torch.autograd.grad with a node as input: it returns the gradient and adds to nothing
        return False


_functorch = torch._C._functorch
current_transform: Callable[[], object | None] = _functorch.peek_interpreter_stack
"""The innermost `torch.func` transform around the caller; None: none."""
T = TypeVar("T")


def untransformed(action: Callable[[], T]) -> T:
    """Call `action` outside of transforms: a view made by `grad` cannot be a parameter's memory."""
    if current_transform() is None:
        return action()
    with temporarily_clear_interpreter_stack():
        return action()


def at_all_levels(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield each tensor and the tensors that transforms have wrapped in it: a backward may reach any of them."""
    return tensors if current_transform() is None else _with_wrapped(tensors)


def _with_wrapped(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
            yield tensor
