"""Which label a loss counts nowhere: seen where it is computed, since neither a model nor a loss_fn says it."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from .sequence_data import IGNORED

_LOSSES = {"cross_entropy", "nll_loss"}  # of torch, and our kernel of that name
_AT = 4  # of torch's arguments: input, target, weight, size_average, ignore_index


class IgnoredLabels(TorchFunctionMode):
    """To be entered around a loss. found: the `ignore_index` of each call of such a loss, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _LOSSES:
            self.found.append(kwargs.get("ignore_index", args[_AT] if len(args) > _AT else IGNORED))
        return func(*args, **kwargs)
