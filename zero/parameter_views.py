"""What the parameters of a group are, as torch sees them: views of a flat buffer, or shapes without values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .layout import FlatLayout
from .released import mark_released


class ParameterViews:
    """Gives parameters their `data`, each time the same two tensors of each, which take no memory of their own."""

    def __init__(self, params: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        self._params = params
        self._layout = layout
        self._views: list[Tensor] = []  # of the flat buffer
        self._without_values: list[Tensor] = []  # a NaN in the shape of each parameter

    def show(self, full: Tensor) -> None:
        """They are views of the flat buffer, (padded_numel,), which is the same at every call. Released or not."""
        if not self._views:  # made while there is memory; torch keeps them, whatever becomes of it
            with torch.inference_mode(False):
                self._views = [full[s.offset_in_flat : s.end_in_flat].view(s.shape) for s in self._layout.slots]
        self._point(self._views)

    def empty(self, full: Tensor) -> None:
        """They have shapes without values (a NaN, expanded), and raise when they are read."""
        if not self._without_values:
            with torch.inference_mode(False):
                value = torch.nan if full.dtype.is_floating_point else 0
                nothing = torch.full((), value, dtype=full.dtype, device=full.device)
                self._without_values = [nothing.expand(param.shape) for param in self._params]
        self._point(self._without_values)
        mark_released(self._params, self._layout.names)

    def _point(self, values: Sequence[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for param, value in zip(self._params, values, strict=True):
                param.data = value
