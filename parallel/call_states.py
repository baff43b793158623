"""Copies of what a forward may add to, such as a cache of keys, so that it can be called twice."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _SameTensors(TorchFunctionMode):
    """Copies of objects have the tensors that these have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def copy_states(values: Any) -> Any:
    """With copies of what a forward may add to beside tensors, such as a cache of keys."""

    def copied(value: Any) -> Any:
        return value if value is None or isinstance(value, Tensor) else copy.deepcopy(value)

    with _SameTensors():
        return tree_map(copied, values)
