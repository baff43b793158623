"""What a microbatch of a model keeps, computes and moves, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple


class Operation(NamedTuple):
    """Calls of one of torch's operations that are alike. size: operations of a product, else bytes read and written."""

    name: str  # as the curves of `measured.py`
    dtype: str
    size: int
    calls: int


class Exchanged(NamedTuple):
    """One call of `comm.Exchange`. nbytes: of the whole tensor. sent: by the rank, as that counts."""

    axis: str
    kind: Literal["sum", "sum_part", "gather", "swap", "trade"]
    nbytes: int
    sent: int


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
    forward_exchanges: tuple[Exchanged, ...] = ()  # with ranks that share layers or sequences
    backward_exchanges: tuple[Exchanged, ...] = ()  # with those of what is computed again

    @property
    def exchanges(self) -> tuple[Exchanged, ...]:
        return self.forward_exchanges + self.backward_exchanges


@dataclass(frozen=True)
class Profile:
    """What one rank does of a microbatch of so many rows, by part in the order of the forward.

    sizes: of the axes on which ranks share sequences and layers, as `Arrangement.sizes`.
    """

    rows: int
    tokens: int  # of a microbatch: elements of its first integer tensor, else rows
    parts: Mapping[str, Part] = field(default_factory=dict)
    itemsize: int = 4  # of what is computed in
    cast_bytes: int = 0  # of its inputs in another dtype than they came in
    sizes: tuple[tuple[str, int], ...] = ()
    slot_bytes: int = 0  # through which the rank's exchanges go: see `MetaRoute`

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
        tokens, cast = self.tokens // self.rows * rows, self.cast_bytes * rows // self.rows
        return replace(self, rows=rows, tokens=tokens, parts=parts, cast_bytes=cast, slot_bytes=0)

    @property
    def flops(self) -> int:
        """Of forward and backward."""
        return sum(part.forward_flops + part.backward_flops for part in self.parts.values())


_NUMBERS = [one.name for one in fields(Part) if not one.name.endswith(("_operations", "_exchanges"))]


def _on_line(one: Part, other: Part, times: float) -> Part:
    found: dict[str, Any] = {}
    for name in _NUMBERS:
        found[name] = _number_on_line(getattr(one, name), getattr(other, name), times)
    for name in ("forward_exchanges", "backward_exchanges"):
        found[name] = _calls_on_line(getattr(one, name), getattr(other, name), times)
    return Part(**found)


def _calls_on_line(one: Sequence[Exchanged], other: Sequence[Exchanged], times: float) -> tuple[Exchanged, ...]:
    """None where these are not the same calls: then nothing is known of them."""
    if [call[:2] for call in one] != [call[:2] for call in other]:
        return ()
    return tuple(
        first._replace(nbytes=_number_on_line(first.nbytes, second.nbytes, times))
        for first, second in zip(one, other, strict=True)
    )


def _number_on_line(first: int, second: int, times: float) -> int:
    return max(0, math.floor(first + times * (second - first)))
