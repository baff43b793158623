"""The mean over ranks of what each of them has, sent as signs: the compressed all-reduce of 1-bit Adam.

    rank i   x_i + its error --signs, scales--> \\
    rank j   x_j + its error --signs, scales-->  who has the region: mean + its error --signs, scales--> all

Each rank keeps what its signs did not say, and says it with the next: the worker's error of all elements, the server's
of its region. Source: 1-bit Adam, arXiv 2102.02888, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm import Exchange, regions_of
from ..kernels.sign_bits import BITS, packed_signs, unpacked_signs
from .layout import FlatLayout

Stretch = tuple[int, int, int]
"""(index of a parameter, start, end) in a region."""


@dataclass(frozen=True)
class SignLayout:
    """What of each parameter lies in whose region: each such stretch has a scale of its own.

    A message is the signs of a region, and a scale for each stretch in it.
    """

    regions: tuple[slice, ...]
    stretches: tuple[tuple[Stretch, ...], ...]  # by region
    dtype: torch.dtype  # of what is sent, and of the scales

    @classmethod
    def of(cls, layout: FlatLayout, num_ranks: int, dtype: torch.dtype) -> SignLayout:
        regions = tuple(regions_of(layout.padded_numel, num_ranks))
        stretches = tuple(
            tuple(
                (index, max(slot.offset_in_flat, region.start) - region.start, end - region.start)
                for index, slot in enumerate(layout.slots)
                if max(slot.offset_in_flat, region.start) < (end := min(slot.end_in_flat, region.stop))
            )
            for region in regions
        )
        return cls(regions, stretches, dtype)

    def numel(self, place: int) -> int:
        """Elements of a region."""
        return int(self.regions[place].stop) - int(self.regions[place].start)

    def nbytes(self, place: int) -> int:
        """Of a message with the signs of a region."""
        return self.numel(place) // BITS + len(self.stretches[place]) * self.dtype.itemsize

    @property
    def max_nbytes(self) -> int:
        return max(map(self.nbytes, range(len(self.regions))))

    def bytes_sent(self, place: int) -> int:
        """By one rank, in one mean, to all others together."""
        others = sum(self.nbytes(other) for other in range(len(self.regions)) if other != place)
        return others + self.max_nbytes * (len(self.regions) - 1)

    def error_numel(self, place: int) -> int:
        """Elements of both errors of a rank; none where nobody else is."""
        if len(self.regions) == 1:
            return 0
        return sum(map(self.numel, range(len(self.regions)))) + self.numel(place)


@dataclass
class SignMean:
    """Of one group: its errors, and the exchange."""

    layout: SignLayout
    exchange: Exchange
    what: str
    worker_error: Tensor = field(init=False)  # (padded_numel,)
    server_error: Tensor = field(init=False)  # (elements of the region,)

    def __post_init__(self) -> None:
        place = self.exchange.place
        region, whole = self.layout.regions[place], self.layout.regions[-1].stop
        sizes = (whole, region.stop - region.start) if self.exchange.size > 1 else (0, 0)
        self.worker_error, self.server_error = (torch.zeros(size, dtype=self.layout.dtype) for size in sizes)

    def to(self, device: torch.device) -> SignMean:
        """The errors there."""
        self.worker_error, self.server_error = self.worker_error.to(device), self.server_error.to(device)
        return self

    @property
    def nbytes(self) -> int:
        return self.worker_error.nbytes + self.server_error.nbytes

    def mean(self, values: Tensor, unused: Collection[int] = ()) -> Tensor:
        """values: (padded_numel,), used up -> what the ranks say of their mean; a collective.

        unused: indices of parameters whose errors stay as they are, and whose mean is 0.
        """
        size, place, layout = self.exchange.size, self.exchange.place, self.layout
        if size == 1:
            return values
        values += self.worker_error
        messages = []
        for other, region in enumerate(layout.regions):
            message, said = self._encoded(values[region], other, unused)
            messages.append(message)
            self._keep(self.worker_error[region], values[region], said, other, unused)
        counts = tuple(tuple(map(layout.nbytes, range(size))) for _ in range(size))
        arrived = self.exchange.swap_rows(torch.cat(messages), counts, f"signs of {self.what}")
        own = layout.regions[place]
        total = torch.zeros(own.stop - own.start, dtype=values.dtype, device=values.device)
        for message in arrived.view(size, -1):
            total += self._decoded(message, place)
        total.div_(size).add_(self.server_error)
        message, said = self._encoded(total, place, unused)
        self._keep(self.server_error, total, said, place, unused)
        padded = torch.nn.functional.pad(message, (0, layout.max_nbytes - message.numel()))
        gathered = self.exchange.gather(padded, 0, f"mean signs of {self.what}").view(size, -1)
        for other, region in enumerate(layout.regions):
            values[region] = self._decoded(gathered[other, : layout.nbytes(other)], other)
        return values

    def _encoded(self, values: Tensor, place: int, unused: Collection[int]) -> tuple[Tensor, Tensor]:
        """(message, what it says) of a region."""
        stretches: Sequence[Stretch] = self.layout.stretches[place]
        zero = values.new_zeros(())
        found = [zero if index in unused else _scale(values[low:high]) for index, low, high in stretches]
        scales = torch.stack(found) if found else values.new_empty(0)
        message = torch.cat([packed_signs(values), scales.view(torch.uint8)])
        return message, self._decoded(message, place)

    def _decoded(self, message: Tensor, place: int) -> Tensor:
        region, stretches = self.layout.regions[place], self.layout.stretches[place]
        num_bytes = (region.stop - region.start) // BITS
        signs = unpacked_signs(message[:num_bytes], self.layout.dtype)
        scales = message[num_bytes:].clone().view(self.layout.dtype)  # aligned
        end = 0
        for (_, low, high), scale in zip(stretches, scales, strict=True):
            signs[end:low] = 0
            signs[low:high] *= scale
            end = high
        signs[end:] = 0
        return signs

    def _keep(self, error: Tensor, values: Tensor, said: Tensor, place: int, unused: Collection[int]) -> None:
        for index, low, high in self.layout.stretches[place]:
            if index not in unused:
                torch.sub(values[low:high], said[low:high], out=error[low:high])


def _scale(values: Tensor) -> Tensor:
    """(): signs that are multiplied by it have the norm of the values."""
    scale: Tensor = values.norm() / math.sqrt(values.numel())
    return scale
