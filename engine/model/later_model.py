"""A model whose values are not in its parameters yet, but come one parameter at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class LaterModel(ABC):
    """module: whose parameters have shapes and no memory, but those that are `given`, which have their values."""

    module: nn.Module
    given: Sequence[nn.Parameter]
    random_state: Tensor | None
    """Of torch's generator, from which `values` draws: the same on all ranks. None: it draws nothing."""

    @abstractmethod
    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its values), each parameter once but the given ones. All ranks must take them together."""


def move(param: nn.Parameter, values: Tensor) -> None:
    """Gives the parameter other memory, perhaps of another device; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(param, values):
        param.data = values
    else:
        # The device is of a package beside torch (NPU). There `module.to` makes new parameters, which an optimizer
        # that the caller has made would not know.
        torch._C._swap_tensor_impl(param, nn.Parameter(values, requires_grad=param.requires_grad))
