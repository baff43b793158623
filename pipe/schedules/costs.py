"""Time and bytes of each action (`Costs`): the input of the simulator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .schedule import Action, Op

_TIMES = {Op.F: "forward", Op.B: "backward", Op.I: "input_backward", Op.W: "weight_backward"}  # fields of Costs


@dataclass(frozen=True)
class Costs:
    """Costs by stage, (num_stages,) each. All times have the same unit (seconds or forwards), and all bytes too."""

    forward: tuple[float, ...]  # time of F
    backward: tuple[float, ...]  # time of B
    input_backward: tuple[float, ...]  # time of I
    weight_backward: tuple[float, ...]  # time of W
    activation_bytes: tuple[float, ...]  # held from F to B or I, per microbatch
    kept_bytes: tuple[float, ...]  # the part of activation_bytes that is held from I to W
    parameter_bytes: tuple[float, ...]  # of the stage's full parameters
    send: float = 0.0  # time from the end of an action until its output is on the peer rank
    collect: tuple[float, ...] = ()  # reduction of gradients after B or W, except of a stage's last microbatch
    collect_half: tuple[float, ...] = ()  # reduction before B or I of the gradients of an I whose W has not come

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if field.name == "send" or (field.name in ("collect", "collect_half") and not values):
                continue
            if len(values) != self.num_stages:
                raise ValueError(
                    f"{field.name}: expected a value for each of {self.num_stages} stages, found {len(values)} values"
                )
            for stage, value in enumerate(values):
                if value < 0:
                    raise ValueError(f"{field.name} of stage {stage}: expected 0 or more, found {value:g}")
        for stage, (kept, whole) in enumerate(zip(self.kept_bytes, self.activation_bytes, strict=True)):
            # The simulators hold `whole - kept` from F to I, which must not be negative.
            if kept > whole:
                raise ValueError(
                    f"kept_bytes of stage {stage}: expected at most activation_bytes, {whole:g}, found {kept:g}"
                )
        if self.send < 0:
            raise ValueError(f"send: expected 0 or more, found {self.send:g}")

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
        kept_bytes: float | None = None,  # default: activation_bytes
        parameter_bytes: float = 0.0,
    ) -> Costs:
        """Make the same costs for every stage. By default F, I and W take a unit of time each."""
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
        """Return the time that `action` keeps its rank busy, without reductions: 0 except for F, B, I and W."""
        by_stage: tuple[float, ...] | None = getattr(self, _TIMES.get(action.op, ""), None)
        return 0.0 if by_stage is None else by_stage[action.stage]
