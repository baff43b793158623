"""What a microbatch of a model keeps, computes and moves, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple


class Operation(NamedTuple):
    """Calls of one of torch's operations that are alike. size: operations of a product, else bytes read and written."""

    name: str  # as the curves of `measured.py`
    dtype: str
    size: int
    calls: int


PRODUCTS = ("mm", "bmm", "attention", "attention backward")


def median_bytes(operations: Sequence[Operation]) -> float:
    """Half of the calls that move bytes move less; 0 where none does. Of products it is not known."""
    moving = sorted((one.size, one.calls) for one in operations if one.size and one.name not in PRODUCTS)
    left = sum(calls for _, calls in moving) / 2
    for size, calls in moving:
        left -= calls
        if left <= 0:
            return float(size)
    return 0.0


class ComputePhase(Enum):
    """What a part computes at a moment."""

    FORWARD = "forward"
    BACKWARD_START = "backward, until the first gradient of its parameters is made"
    BACKWARD_REST = "backward, from there on"
    HOLDING = "backward, while it keeps the gradients that it makes"
    COLLECTING = "all these are there, and are collected"


class CollectiveCall(NamedTuple):
    """One call of `comm.Collectives`. nbytes: of the whole tensor. sent: by the rank, as that counts."""

    axis: str
    kind: Literal["sum", "sum_part", "gather", "swap", "trade"]
    nbytes: int
    sent: int


@dataclass(frozen=True)
class ProfilePart:
    """Of one unit, or of what comes before the first or behind the last one. Bytes are of tensors, parameters left out.

    Kept and peaks count what is above what was there when the part's forward began.
    """

    kept_bytes: int = 0  # when its forward has ended: saved for the backward, and its output
    forward_peak_bytes: int = 0
    backward_start_bytes: int = 0  # the most of its backward until its first gradient is made,
    backward_rest_bytes: int = 0  # and from there on
    backward_end_bytes: int = 0  # when it has ended, gradients left out
    output_bytes: int = 0
    rest_gradient_bytes: int = (
        0  # made in its backward, of parameters of no unit: they wait for the end of the backward
    )
    # A pipeline keeps a stage's gradients until its whole backward has ended, accumulation in another dtype a unit's:
    gradient_bytes: int = 0  # made in its backward, of all parameters
    holding_peak_bytes: int = 0  # of the backward, while it keeps them
    linear_bytes: int = 0  # inputs of its linear layers, and gradients of their outputs: kept from I until W
    forward_flops: int = 0  # of matrix products, convolutions and attention
    backward_flops: int = 0  # with what is computed again
    forward_traffic: int = 0  # bytes that all other operations read and write
    backward_traffic: int = 0
    forward_operations: tuple[Operation, ...] = ()  # the same call by call; none: not known
    backward_operations: tuple[Operation, ...] = ()
    forward_exchanges: tuple[CollectiveCall, ...] = ()  # with ranks that share layers or sequences
    backward_exchanges: tuple[CollectiveCall, ...] = ()  # with those of what is computed again

    @property
    def backward_peak_bytes(self) -> int:
        return max(self.backward_start_bytes, self.backward_rest_bytes)

    def peak_bytes(self, stretch: ComputePhase) -> int:
        match stretch:
            case ComputePhase.FORWARD:
                return self.forward_peak_bytes
            case ComputePhase.BACKWARD_START:
                return self.backward_start_bytes
            case ComputePhase.BACKWARD_REST:
                return self.backward_rest_bytes
            case ComputePhase.HOLDING:
                return self.holding_peak_bytes
            case ComputePhase.COLLECTING:
                return self.backward_end_bytes + self.gradient_bytes

    @property
    def exchanges(self) -> tuple[CollectiveCall, ...]:
        return self.forward_exchanges + self.backward_exchanges


_NOTHING = ProfilePart()


@dataclass(frozen=True)
class Profile:
    """What one rank does of a microbatch of so many rows, by part in the order of the forward.

    sizes: of the axes on which ranks share sequences and layers, as `ParallelDims.sizes`.
    """

    rows: int
    tokens: int  # of a microbatch: elements of its first integer tensor, else rows
    parts: Mapping[str, ProfilePart] = field(default_factory=dict)
    itemsize: int = 4  # of what is computed in
    cast_bytes: int = 0  # of its inputs in another dtype than they came in
    sizes: tuple[tuple[str, int], ...] = ()
    slot_bytes: int = 0  # through which the rank's exchanges go: see `MetaTransport`

    def part(self, name: str) -> ProfilePart:
        """A unit that is never run takes nothing."""
        return self.parts.get(name, _NOTHING)

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
        pairs = {name: (part, other.part(name)) for name, part in self.parts.items()}
        known = {(id(one), id(two)): _on_line(one, two, times) for one, two in _different(pairs.values())}
        parts = {name: known[id(one), id(two)] for name, (one, two) in pairs.items()}  # equal blocks stay one
        tokens, cast = self.tokens // self.rows * rows, self.cast_bytes * rows // self.rows
        return replace(self, rows=rows, tokens=tokens, parts=parts, cast_bytes=cast, slot_bytes=0)

    @property
    def flops(self) -> int:
        """Of forward and backward."""
        return sum(part.forward_flops + part.backward_flops for part in self.parts.values())


_NUMBERS = [one.name for one in fields(ProfilePart) if not one.name.endswith(("_operations", "_exchanges"))]


def _different(pairs: Iterable[tuple[ProfilePart, ProfilePart]]) -> Iterable[tuple[ProfilePart, ProfilePart]]:
    return {(id(one), id(two)): (one, two) for one, two in pairs}.values()


def _on_line(one: ProfilePart, other: ProfilePart, times: float) -> ProfilePart:
    found: dict[str, Any] = {}
    for name in _NUMBERS:
        found[name] = _number_on_line(getattr(one, name), getattr(other, name), times)
    for name in ("forward_exchanges", "backward_exchanges"):
        found[name] = _calls_on_line(getattr(one, name), getattr(other, name), times)
    return ProfilePart(**found)


def _calls_on_line(
    one: Sequence[CollectiveCall], other: Sequence[CollectiveCall], times: float
) -> tuple[CollectiveCall, ...]:
    """None where these are not the same calls: then nothing is known of them."""
    if [call[:2] for call in one] != [call[:2] for call in other]:
        return ()
    return tuple(
        first._replace(nbytes=_number_on_line(first.nbytes, second.nbytes, times))
        for first, second in zip(one, other, strict=True)
    )


def _number_on_line(first: int, second: int, times: float) -> int:
    return max(0, math.floor(first + times * (second - first)))
