"""Batches without their values, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def described(value: Any) -> Any:
    """A batch without its values: shapes and dtypes, in their nesting."""
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"items": {str(key): described(one) for key, one in value.items()}}
    if isinstance(value, (tuple, list)):
        return {"list": [described(one) for one in value]}
    return {"value": value if isinstance(value, (str, int, float, bool)) else None}


def made(description: Any) -> Any:
    """A batch like the one that was described, without memory."""
    if "shape" in description:
        return torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device="meta")
    if "items" in description:
        return {key: made(one) for key, one in description["items"].items()}
    if "list" in description:
        return tuple(made(one) for one in description["list"])
    return description["value"]
