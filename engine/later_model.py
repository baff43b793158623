"""A model whose values are not in its parameters yet, but come one parameter at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

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
