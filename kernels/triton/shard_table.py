"""Where the tensors of many shards are, as an optimizer's kernel on the device reads it: one launch updates them all.

A row of the table is a shard: the number of its first program, its length, the number of its first element where bits
are drawn by number, and the addresses of its tensors. Programs are dealt out to the shards in order, a tile each, so a
shard's last program may have less than a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .option_runs import on_device

Row = tuple[int, ...]
NUM_FIELDS = 11
"""First program, length, first number, weight, gradient, two states, their scales, output, remainder; an address is 0
without."""


@dataclass(frozen=True)
class ShardTable:
    """On the device."""

    rows: Tensor  # (shards, NUM_FIELDS) int64
    is_aligned: bool  # all addresses are multiples of 16 bytes


# Both are kept for the stream that they were copied on, as those of `option_runs.py`. They say no more than their keys.
@lru_cache(maxsize=64)
def shard_table(rows: tuple[Row, ...], device: torch.device, stream: int) -> ShardTable:
    """Copied anew where an address has changed, as those of gradients may from step to step."""
    is_aligned = not any(address % 16 for row in rows for address in row[3:])
    return ShardTable(on_device(torch.tensor(rows, dtype=torch.int64), device), is_aligned)


@lru_cache(maxsize=64)
def shard_of_program(num_programs: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """(programs,) int32: whose tile each program has. num_programs: of each shard."""
    shards = torch.arange(len(num_programs), dtype=torch.int32)
    return on_device(shards.repeat_interleave(torch.tensor(num_programs)), device)
