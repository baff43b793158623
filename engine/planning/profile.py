"""What a microbatch of a model keeps, computes and moves, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple


class Operation(NamedTuple):
    """Calls of one of torch's operations that are alike. size: operations of a product, else bytes read and written."""

    name: str  # as the curves of `measured.py`
    dtype: str
    size: int
    calls: int


@dataclass(frozen=True)
class Part:
    """Of one unit, or of what comes before the first or behind the last one. Bytes are of tensors, parameters left out.

    Kept and peaks count what is above what was there when the part's forward began.
    """

    kept_bytes: int = 0  # when its forward has ended: saved for the backward, and its output
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    output_bytes: int = 0
    rest_gradient_bytes: int = (
        0  # made in its backward, of parameters of no unit: they wait for the end of the backward
    )
    # A pipeline keeps a stage's gradients until its whole backward has ended:
    gradient_bytes: int = 0  # made in its backward, of all parameters
    holding_peak_bytes: int = 0  # of the backward, while it keeps them
    linear_bytes: int = 0  # inputs of its linear layers, and gradients of their outputs: kept from I until W
    forward_flops: int = 0  # of matrix products, convolutions and attention
    backward_flops: int = 0  # with what is computed again
    forward_traffic: int = 0  # bytes that all other operations read and write
    backward_traffic: int = 0
    forward_operations: tuple[Operation, ...] = ()  # the same call by call; none: not known
    backward_operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A microbatch of so many rows, by part in the order of the forward."""

    rows: int
    tokens: int  # of a microbatch: elements of its first integer tensor, else rows
    parts: Mapping[str, Part] = field(default_factory=dict)
    itemsize: int = 4  # of what is computed in
    cast_bytes: int = 0  # of its inputs in another dtype than they came in

    def part(self, name: str) -> Part:
        """A unit that is never run takes nothing."""
        return self.parts.get(name, Part())

    @property
    def names(self) -> list[str]:
        """In order, START first and END last."""
        return list(self.parts)

    def base_bytes(self) -> dict[str, int]:
        """What is kept of the parts before each, by name."""
        bases, total = {}, 0
        for name, part in self.parts.items():
            bases[name] = total
            total += part.kept_bytes
        return bases

    @property
    def peak_bytes(self) -> int:
        """The most of a forward and backward of the whole."""
        bases = self.base_bytes().values()
        return max(
            base + max(part.forward_peak_bytes, part.backward_peak_bytes)
            for base, part in zip(bases, self.parts.values(), strict=True)
        )

    @property
    def loss_bytes(self) -> int:
        """The most beside what is kept before it: of what comes behind the blocks, with logits, loss and gradients."""
        behind = [self.parts[name] for name in self.names[-2:]]
        last = behind[-1] if behind[-1].forward_peak_bytes else behind[0]
        return max(last.forward_peak_bytes, last.backward_peak_bytes)

    def extended(self, other: Profile, rows: int) -> Profile:
        """Of so many rows, on the line through this one and another. The largest of several is no less than that.

        What is called is not known of it.
        """
        times = (rows - self.rows) / (other.rows - self.rows)
        parts = {name: _on_line(part, other.part(name), times) for name, part in self.parts.items()}
        return Profile(rows, self.tokens // self.rows * rows, parts, self.itemsize, self.cast_bytes * rows // self.rows)

    @property
    def flops(self) -> int:
        """Of forward and backward."""
        return sum(part.forward_flops + part.backward_flops for part in self.parts.values())


_NUMBERS = [one.name for one in fields(Part) if not one.name.endswith("_operations")]


def _on_line(one: Part, other: Part, times: float) -> Part:
    found = {}
    for name in _NUMBERS:
        first, second = getattr(one, name), getattr(other, name)
        found[name] = max(0, math.floor(first + times * (second - first)))
    return Part(**found)
