"""The section `outer`: islands of ranks that train apart, and exchange what they have become every so many steps."""

from typing import Annotated, Literal

from pydantic import Field

from ...configs.section import Bool, Float, Natural, Positive, Section
from .errors import Fault
from .idle import idle

OuterDtype = Literal["fp32", "bf16", "int8", "int4"]


class OuterConfig(Section):
    """Islands of ranks, such as hosts, that train apart, and exchange what they have become every so many steps, as
    DiLoCo does: see docs/fewer-bytes.md."""

    every: Positive | None = None
    """Steps between two exchanges of a parameter. null: there are no islands, and all ranks train together."""

    ranks: Positive | None = None
    """Ranks of an island; it must divide the ranks of the job. null: those of a host, or of `lowtide launch
    --islands`."""

    optimizer: Literal["nesterov", "sgd", "average"] = "nesterov"
    """What is made of the mean over islands of (parameters at the last exchange - parameters now): "nesterov" and "sgd"
    take it for a gradient, with `lr` and `momentum`; "average" gives the mean of the parameters."""

    lr: Float = Field(default=0.7, gt=0)
    """The learning rate of "nesterov" and "sgd"."""

    momentum: Float = Field(default=0.9, ge=0, lt=1)
    """The momentum of "nesterov" and "sgd"."""

    fragments: Positive = 1
    """Into so many parts are the units of the model divided, block by block in turn, and each has exchanges of its own,
    `every` steps apart: at most one part is on the wire at a time, and the peak is that of a part (streaming)."""

    overlap: Natural = 0
    """Steps that are made while an exchange is under way; then its result is taken over. Less than `every`."""

    alpha: Annotated[Float | None, Field(ge=0, lt=1)] = None
    """Parameters become alpha x those of this island + (1 - alpha) x those of all. null: 0.5 with overlap, else 0."""

    dtype: OuterDtype | None = None
    """The type on the wire. null: that of the master weights, at least fp32. "int8" and "int4": blocks of 128 with a
    scale, rounded at random so that the mean is exact (`seed`). Sums are made in fp32."""

    offload: Bool = True
    """Keep the parameters of the last exchange and the momentum in host memory, where the model is elsewhere."""

    timeout_seconds: Float = Field(default=600.0, gt=0)
    """How long an exchange waits for other islands without a byte of theirs, and, after a failure, for those that are
    left to say so. Who does not come in that time is left out; of ranks that `lowtide launch` has seen die everyone
    knows at once."""

    @property
    def has_islands(self) -> bool:
        """False where the section is off, or says the same as plain data parallelism."""
        return self.every is not None and not self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether it says: each step, the mean of all. That is data parallelism, which all ranks do together."""
        says_mean = (
            self.optimizer == "average" and self.overlap == 0 and not self.alpha and self.dtype in (None, "fp32")
        )
        return self.every == 1 and says_mean

    @property
    def mixing(self) -> float:
        """Which part of an island's own parameters stays."""
        return self.alpha if self.alpha is not None else 0.5 if self.overlap else 0.0


def outer_faults(outer: OuterConfig, masters: bool | Literal["kahan", "int8"]) -> list[Fault]:
    """What contradicts itself in the section, or bf16.masters."""
    if outer.every is None:
        return []
    found = []
    if isinstance(masters, str):
        message = f'needs bf16.masters true or false, found "{masters}": what remainders hold is not exchanged'
        found.append(Fault("outer.every", "conflict", message))
    if outer.overlap >= outer.every:
        message = (
            f"must be less than outer.every ({outer.every}), found {outer.overlap}: the next exchange has begun then"
        )
        found.append(Fault("outer.overlap", "conflict", message))
    if outer.fragments > outer.every:
        message = (
            f"must be at most outer.every ({outer.every}), found {outer.fragments}: each is exchanged in another step"
        )
        found.append(Fault("outer.fragments", "conflict", message))
    if outer.optimizer == "average":
        for key in sorted({"lr", "momentum"} & outer.model_fields_set):
            if getattr(outer, key) != type(outer).model_fields[key].default:
                message = (
                    'has no meaning with outer.optimizer "average", which takes the mean; leave it out, or set "sgd"'
                )
                found.append(Fault(f"outer.{key}", "conflict", message))
    return found


def outer_notes(outer: OuterConfig) -> list[str]:
    """What has no effect."""
    if outer.every is None:
        return idle("outer", outer, "outer.every is null")
    if outer.is_plain:
        return [
            'outer: every 1 with optimizer "average" is data parallelism, so all ranks train together: gradients are '
            "summed over all of them in each step, there are no islands, and a rank that is lost ends the job"
        ]
    return []
