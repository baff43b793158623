"""How much memory a rank's list of actions needs at most. It follows from the order alone, not from the times."""

from dataclasses import dataclass

from .action import Op
from .costs import Costs
from .schedule import Schedule


@dataclass(frozen=True)
class Peaks:
    """The most of everything that one rank holds at one moment, in the unit of `Costs`."""

    activation_bytes: float
    parameter_bytes: float  # all stages of the rank, or those gathered at a time
    total_bytes: float  # of both together: at most their sum
    in_flight: int  # microbatches of a stage whose backward is to come, over all stages of the rank


def peaks_of_rank(schedule: Schedule, costs: Costs, rank: int) -> Peaks:
    """Walks through the rank's list. An action's own memory counts while it runs.

    F adds the activations of its stage; B frees them; I frees them but for what W needs; W frees that. In a
    schedule that only goes forward, F frees its activations when it ends. Buffers of messages are not counted.
    """
    forward_only = schedule.is_forward_only
    gathers = schedule.has_any(Op.GATHER)
    activation = in_flight = 0.0
    parameter = 0.0 if gathers else sum(costs.parameter_bytes[stage] for stage in schedule.stages_of_rank(rank))
    peaks = [0.0, parameter, parameter, 0.0]
    for action in schedule.actions[rank]:
        op, stage = action.op, action.stage
        if op is Op.F:
            activation += costs.activation_bytes[stage]
            in_flight += 1
        elif op is Op.GATHER:
            parameter += costs.parameter_bytes[stage]
        if op in (Op.F, Op.GATHER):
            now = (activation, parameter, activation + parameter, in_flight)
            peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
        if op is Op.B or (op is Op.F and forward_only):
            activation -= costs.activation_bytes[stage]
            in_flight -= 1
        elif op is Op.I:
            activation -= costs.activation_bytes[stage] - costs.kept_bytes[stage]
            in_flight -= 1
        elif op is Op.W:
            activation -= costs.kept_bytes[stage]
        elif op is Op.RELEASE:
            parameter -= costs.parameter_bytes[stage]
    return Peaks(peaks[0], peaks[1], peaks[2], int(peaks[3]))
