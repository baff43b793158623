"""Gradients of large weights, written by their layer's backward where they are reduced from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..kernels.linear_layers import LinearLayers, gradient_of, weight_gradient
from ..model.ledger import Ledger
from .sequence import UnitSequence

_MIN_NUMEL = 1 << 17  # of a weight; the copy of a smaller one costs less than a backward that is written in Python


class DirectGradients:
    """Saves the linear layers of a model a tensor for each gradient of a weight, and the copy of it.

        dw = dy^T x  ---written to--->  slot (or shard)  <---view--- param.grad

    Autograd takes a gradient as it is given, so `param.grad` is a view of that memory, and `Staging` sees that nothing
    is left to be copied. Where there is no memory yet, or the gradient has to be cast or added, it is a tensor as ever;
    and where hooks of a user see it, who may keep it for longer than the memory is its own.
    """

    def __init__(self, sequence: UnitSequence, modules: Iterable[nn.Module], ledger: Ledger) -> None:
        """modules: those with large weights among them are taken."""
        self._sequence = sequence
        large = (module for module in modules if _weight_numel(module) >= _MIN_NUMEL)
        LinearLayers(large, self._make, ledger)

    def _make(self, param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
        if x is None or not dy.dtype == x.dtype == param.dtype or _is_seen_by_others(param):
            return gradient_of(dy, x, is_transposed)
        return weight_gradient(dy, x, is_transposed, self._sequence.place_for_gradient(param))


def _is_seen_by_others(param: nn.Parameter) -> bool:
    """Whether its gradient is given to hooks besides the one of `UnitHooks`."""
    after = param._post_accumulate_grad_hooks or ()
    return bool(param._backward_hooks) or len(after) > 1


def _weight_numel(module: nn.Module) -> int:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight.numel() if weight is not None and weight.requires_grad else 0
