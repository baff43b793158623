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


def of_whole(description: Any, size: int) -> Any:
    """What a batch was like, of whose sequences `size` ranks share this part: see `SequenceData`."""
    items = description.get("items", {})
    if size == 1 or "position_ids" not in items:
        return description
    length = items["position_ids"]["shape"][1]

    def grown(one: Any) -> Any:
        shape = one.get("shape", [])
        if len(shape) < 2 or shape[1] != length:
            return one
        return {**one, "shape": [shape[0], length * size, *shape[2:]]}

    return {"items": {key: grown(one) for key, one in items.items()}}


def made(description: Any) -> Any:
    """A batch like the one that was described, without memory."""
    if "shape" in description:
        return torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device="meta")
    if "items" in description:
        return {key: made(one) for key, one in description["items"].items()}
    if "list" in description:
        return tuple(made(one) for one in description["list"])
    return description["value"]
