"""What each action costs, in time and in bytes: the input of the simulator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .schedule import Action, Op


@dataclass(frozen=True)
class Costs:
    """Costs by stage; all times in one unit (seconds, or forwards), all bytes in one unit (bytes, or microbatches)."""

    forward: tuple[float, ...]  # (num_stages,) time of F
    backward: tuple[float, ...]  # time of B
    input_backward: tuple[float, ...]  # time of I
    weight_backward: tuple[float, ...]  # time of W
    activation_bytes: tuple[float, ...]  # held from F to B or I, for each microbatch
    kept_bytes: tuple[float, ...]  # what of it is held on from I to W
    parameter_bytes: tuple[float, ...]  # of the stage's full parameters
    send: float = 0.0  # time from the end of an action to when another rank has what it made
    collect: tuple[float, ...] = ()  # time after B or W of all microbatches but the last: gradients go to other ranks
    collect_half: tuple[float, ...] = ()  # time before B or I where a W is still to come: those of the I before it go

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if field.name == "send" or (field.name in ("collect", "collect_half") and not values):
                continue
            if len(values) != self.num_stages:
                raise ValueError(
                    f"{field.name} has {len(values)} values, expected one for each of {self.num_stages} stages"
                )
            for stage, value in enumerate(values):
                if value < 0:
                    raise ValueError(f"{field.name} of stage {stage} is {value:g}, expected 0 or more")
        for stage, (kept, whole) in enumerate(zip(self.kept_bytes, self.activation_bytes, strict=True)):
            if kept > whole:
                raise ValueError(f"kept_bytes of stage {stage} is {kept:g}, more than its activation_bytes ({whole:g})")
        if self.send < 0:
            raise ValueError(f"send is {self.send:g}, expected 0 or more")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_backward: float = 1.0,
        weight_backward: float = 1.0,
        backward: float | None = None,  # default: input_backward + weight_backward
        send: float = 0.0,
        activation_bytes: float = 1.0,
        kept_bytes: float | None = None,  # default: all of it
        parameter_bytes: float = 0.0,
    ) -> Costs:
        """The same costs for every stage; by default one unit of time for each of F, I and W."""
        whole = input_backward + weight_backward if backward is None else backward
        kept = activation_bytes if kept_bytes is None else kept_bytes
        return cls(
            forward=(forward,) * num_stages,
            backward=(whole,) * num_stages,
            input_backward=(input_backward,) * num_stages,
            weight_backward=(weight_backward,) * num_stages,
            send=send,
            activation_bytes=(activation_bytes,) * num_stages,
            kept_bytes=(kept,) * num_stages,
            parameter_bytes=(parameter_bytes,) * num_stages,
        )

    def time(self, action: Action) -> float:
        """How long `action` keeps its rank busy, without what is collected beside it: 0 but for F, B, I, W."""
        if action.op is Op.F:
            return self.forward[action.stage]
        if action.op is Op.B:
            return self.backward[action.stage]
        if action.op is Op.I:
            return self.input_backward[action.stage]
        if action.op is Op.W:
            return self.weight_backward[action.stage]
        return 0.0
