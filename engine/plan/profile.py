"""Memory, operations and traffic of a microbatch, by part of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple


class Operation(NamedTuple):
    """Equal calls of a torch operation. size: operations of a product, else bytes read and written."""

    name: str  # as in the names of curves, see `measured.py`
    dtype: str
    size: int
    calls: int


PRODUCTS = ("mm", "bmm", "attention", "attention backward")


def median_bytes(operations: Sequence[Operation]) -> float:
    """Return the median over calls of the bytes that a call moves; 0 without calls that move bytes.

    Products are left out because their bytes are unknown.
    """
    # Not the mean, which a few huge calls decide: it planned steps with a median error of 27 %, this with 9.5 %.
    moving = sorted((each.size, each.calls) for each in operations if each.size and each.name not in PRODUCTS)
    left = sum(calls for _, calls in moving) / 2
    for size, calls in moving:
        left -= calls
        if left <= 0:
            return float(size)
    return 0.0


class ComputePhase(Enum):
    """A phase of a part's computing."""

    FORWARD = "forward"
    BACKWARD_START = "backward, until the first gradient of its parameters"
    BACKWARD_REST = "backward, from the first gradient on"
    HOLDING = "backward, while its gradients are kept"
    COLLECTING = "after the backward, while its gradients are copied"


class CollectiveCall(NamedTuple):
    """A call of `comm.Collectives`. nbytes: of the whole tensor. sent: bytes that the rank sends."""

    axis: str
    kind: Literal["sum", "sum_part", "gather", "swap", "trade"]
    nbytes: int
    sent: int


@dataclass(frozen=True)
class ProfilePart:
    """Costs of a unit, or of the model before the first or after the last unit. Bytes of tensors without parameters.

    Kept bytes and peaks are relative to the memory at the start of the part's forward.
    """

    kept_bytes: int = 0  # after the forward: tensors saved for the backward, and the output
    forward_peak_bytes: int = 0
    backward_start_bytes: int = 0  # peak of the backward until the first gradient
    backward_rest_bytes: int = 0  # peak of the backward after the first gradient
    backward_end_bytes: int = 0  # after the backward, without gradients
    output_bytes: int = 0
    rest_gradient_bytes: int = 0  # gradients of the root unit's parameters, which wait until the backward ends
    # Pipelines keep a stage's gradients until its backward ends. So does accumulation in another dtype, for a unit.
    gradient_bytes: int = 0  # gradients of all parameters
    holding_peak_bytes: int = 0  # peak of the backward while all gradients are kept
    linear_bytes: int = 0  # inputs and output gradients of linear layers, kept from I until W
    forward_flops: int = 0  # of matrix products, convolutions and attention
    backward_flops: int = 0  # with recomputation
    forward_traffic: int = 0  # bytes that the remaining operations read and write
    backward_traffic: int = 0
    forward_operations: tuple[Operation, ...] = ()  # the same, by call; empty: unknown
    backward_operations: tuple[Operation, ...] = ()
    forward_exchanges: tuple[CollectiveCall, ...] = ()  # with ranks that share layers or sequences
    backward_exchanges: tuple[CollectiveCall, ...] = ()  # with recomputation

    @property
    def backward_peak_bytes(self) -> int:
        return max(self.backward_start_bytes, self.backward_rest_bytes)

    def peak_bytes(self, phase: ComputePhase) -> int:
        match phase:
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
    """Costs of a microbatch of `rows` rows on a rank, by part in the order of the forward.

    sizes: the axes on which ranks share sequences and layers, as `ParallelDims.sizes`.
    """

    rows: int
    tokens: int  # of a microbatch: elements of its first integer tensor, else rows
    parts: Mapping[str, ProfilePart] = field(default_factory=dict)
    itemsize: int = 4  # of the compute dtype
    cast_bytes: int = 0  # of inputs that are cast
    sizes: tuple[tuple[str, int], ...] = ()
    slot_bytes: int = 0  # of the buffers for exchanges, see `MetaTransport`
    input_bytes: int = 0  # of the batch's tensors on the device

    def part(self, name: str) -> ProfilePart:
        """Return a part; a unit that never runs costs nothing."""
        return self.parts.get(name, _NOTHING)

    @property
    def names(self) -> list[str]:
        """The parts in order: START first, END last."""
        return list(self.parts)

    def base_bytes(self) -> dict[str, int]:
        """Return the bytes that earlier parts keep, by part."""
        bases, total = {}, 0
        for name, part in self.parts.items():
            bases[name] = total
            total += part.kept_bytes
        return bases

    @property
    def loss_bytes(self) -> int:
        """The peak of the part after the blocks (head, logits, loss), relative to its start."""
        *_, before, last = self.parts.values()
        # END is empty if the model's head is a unit: then the part before it has the loss.
        last = last if last.forward_peak_bytes else before
        return max(last.forward_peak_bytes, last.backward_peak_bytes)

    def extended(self, other: Profile, rows: int) -> Profile:
        """Return the profile of `rows` rows, on the line through this profile and another.

        The maximum of several linear functions is at least this line. Operations are unknown in the result.
        """
        # value(rows) = first + times x (second - first). Attention does not bend the line: rows are independent.
        times = (rows - self.rows) / (other.rows - self.rows)
        pairs = {name: (part, other.part(name)) for name, part in self.parts.items()}
        different = {(id(a), id(b)): (a, b) for a, b in pairs.values()}
        on_line = {key: _on_line(a, b, times) for key, (a, b) in different.items()}
        parts = {name: on_line[id(a), id(b)] for name, (a, b) in pairs.items()}  # equal blocks share an object
        tokens, cast = self.tokens // self.rows * rows, self.cast_bytes * rows // self.rows
        given = self.input_bytes * rows // self.rows
        return replace(
            self, rows=rows, tokens=tokens, parts=parts, cast_bytes=cast, slot_bytes=0, input_bytes=given
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Operations of forward and backward."""
        return sum(part.forward_flops + part.backward_flops for part in self.parts.values())


_NUMBERS = [field.name for field in fields(ProfilePart) if not field.name.endswith(("_operations", "_exchanges"))]


def _on_line(first: ProfilePart, second: ProfilePart, times: float) -> ProfilePart:
    values: dict[str, Any] = {}
    for name in _NUMBERS:
        values[name] = _number_on_line(getattr(first, name), getattr(second, name), times)
    for name in ("forward_exchanges", "backward_exchanges"):
        values[name] = _calls_on_line(getattr(first, name), getattr(second, name), times)
    return ProfilePart(**values)


def _calls_on_line(
    first: Sequence[CollectiveCall], second: Sequence[CollectiveCall], times: float
) -> tuple[CollectiveCall, ...]:
    """Extrapolate the bytes of calls; () if the two runs make different calls, which a bound may leave out."""
    if [call[:2] for call in first] != [call[:2] for call in second]:
        return ()
    return tuple(
        a._replace(nbytes=_number_on_line(a.nbytes, b.nbytes, times)) for a, b in zip(first, second, strict=True)
    )


def _number_on_line(first: int, second: int, times: float) -> int:
    return max(0, math.floor(first + times * (second - first)))
