"""A few numbers that each rank of an axis gives all others, in memory that all of them map."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import CollectiveError
from .shared_counters import MAILED, SharedCounters
from .trail import AxisTrail

_BOX_NUMEL = 256  # the last one names the call
LETTER_NUMEL = _BOX_NUMEL - 1
"""Numbers that a rank can give at a time."""
MAIL_NUMEL = 2 * _BOX_NUMEL  # of a rank: one box is read while the other is filled


class SharedMail:
    """Every call is a barrier, and an error on a rank whose others came to another one."""

    def __init__(
        self, memory: Tensor, rank: int, ranks: Sequence[int], counters: SharedCounters, channel: AxisTrail
    ) -> None:
        """memory: (size * MAIL_NUMEL,) int64. rank, ranks: as of `Axis`."""
        self._boxes = memory.view(2, len(ranks), _BOX_NUMEL)
        self._rank = rank
        self._ranks = ranks
        self._counters = counters
        self._channel = channel
        self._num_mailed = 0

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Over the ranks. values: (n,) int64, at most LETTER_NUMEL."""
        return self._swap(values, what).sum(dim=0)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value: short texts and numbers."""
        written, room = pickle.dumps(value), 8 * LETTER_NUMEL
        if len(written) > room:
            raise ValueError(f"expected at most {room} bytes in {what}, found {len(written)}")
        everyone = self._swap(torch.frombuffer(bytearray(written.ljust(room)), dtype=torch.int64), what)
        return [pickle.loads(row.tobytes()) for row in everyone.numpy()]

    def _swap(self, values: Tensor, what: str) -> Tensor:
        """(ranks, n): what each has given, to be read before the next but one. values: (n,) int64."""
        sequence = self._channel.begin(what)
        box = self._boxes[self._num_mailed % 2]
        box[self._rank, : values.numel()].copy_(values)
        box[self._rank, -1] = name = zlib.crc32(what.encode())
        self._num_mailed += 1
        self._counters.store(MAILED, self._num_mailed)
        self._counters.wait_for(MAILED, self._num_mailed, what, sequence)
        if not bool((box[:, -1] == name).all()):
            others = [rank for rank, theirs in zip(self._ranks, box[:, -1].tolist(), strict=True) if theirs != name]
            raise CollectiveError(
                f"rank {self._ranks[self._rank]} in {what}: rank {', '.join(map(str, others))} came to another call of "
                f"the engine. All ranks must make the same calls in the same order.{self._channel.compare(others)}"
            )
        return box[:, : values.numel()]
