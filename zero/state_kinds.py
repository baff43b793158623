"""Which tensors are kept of the elements of a shard, and how large they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..kernels.optimizer_states import STATE_BLOCK_NUMEL
from .masters import Masters

MASTER = "master"
NewStates = Callable[[Tensor], dict[str, Tensor]]
"""Master weights, (n,) -> the states before the first step, by name."""
Kinds = Mapping[str, tuple[torch.dtype, int]]
"""Name of a tensor of states, or "master" -> its dtype and number of elements."""


def kinds_of_block(dtype: torch.dtype, masters: Masters, new_states: NewStates) -> Kinds:
    """What is kept of a block of 256 elements beside their parameters, which are of the dtype.

    Seen on a block: an operation on a tensor of the meta device would import 33 MiB of modules.
    """
    is_mixed = masters.are_beside(dtype)
    block = torch.zeros(STATE_BLOCK_NUMEL, dtype=torch.float32 if is_mixed else dtype)
    tensors = {**({MASTER: block} if is_mixed else {}), **new_states(block)}
    return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}


def scaled(kinds: Kinds, numel: int) -> Kinds:
    """What is kept of so many elements."""
    return {name: (dtype, scaled_numel(of_block, numel)) for name, (dtype, of_block) in kinds.items()}


def scaled_numel(numel_of_block: int, numel: int) -> int:
    """How many elements a tensor has of which a block of 256 has numel_of_block: 256, or 1 for scales."""
    return -(-numel * numel_of_block // STATE_BLOCK_NUMEL)
