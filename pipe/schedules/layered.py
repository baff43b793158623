"""Layer by layer on one rank: every microbatch goes through a stage before any goes through the next.

Source: layered gradient accumulation, arXiv 2106.02679; vertical scheduling, arXiv 2512.17570 (GreedySnake).
"""

from collections.abc import Sequence

from .action import Action, Op
from .schedule import Schedule

NAME = "layered"


def layered(num_stages: int, num_microbatches: int, ahead: Sequence[bool] | None = None) -> Schedule:
    """All stages on one rank, with each gather and reduction; microbatch 0 first, forward and backward.

    ahead: (num_stages,) whether a stage is gathered while the one before it computes, or after it. None: parameters
    stay where they are.

        F    0.0 0.1 0.2  1.0 1.1 1.2  2.0 2.1 2.2
        B                                           2.0 2.1 2.2  1.0 1.1 1.2  0.0 0.1 0.2
        full 000000000000 1111111111   222222222222222222222222  1111111111   00000000000      (and the next one, ahead)

    A stage is gathered twice, the last one once, and reduced once. Gradients of a stage add up in the order of the
    microbatches, as where one microbatch follows the other.
    """
    forward = _pass(Op.F, range(num_stages), num_microbatches, ahead)
    backward = _pass(Op.B, range(num_stages - 1, -1, -1), num_microbatches, ahead)
    if ahead is not None:  # the last stage stays gathered between its two passes
        forward, backward = forward[:-1], backward[1:]
    return _on_one_rank(NAME, num_stages, num_microbatches, [*forward, *backward])


def layered_evaluation(num_stages: int, ahead: Sequence[bool] | None = None) -> Schedule:
    """One microbatch forward through all stages."""
    return _on_one_rank(f"{NAME}, evaluation", num_stages, 1, _pass(Op.F, range(num_stages), 1, ahead))


def _on_one_rank(name: str, num_stages: int, num_microbatches: int, actions: Sequence[Action]) -> Schedule:
    return Schedule(name, 1, num_stages, num_microbatches, (0,) * num_stages, (tuple(actions),))


def _pass(op: Op, stages: Sequence[int], num_microbatches: int, ahead: Sequence[bool] | None) -> list[Action]:
    """Through all stages, each gathered before it and released behind it."""
    row = [] if ahead is None else [Action(Op.GATHER, stages[0])]
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        gather = [] if ahead is None or following is None else [Action(Op.GATHER, following)]
        is_ahead = following is not None and ahead is not None and ahead[following]
        row += gather if is_ahead else []
        row += [Action(op, stage, microbatch) for microbatch in range(num_microbatches)]
        row += [Action(Op.REDUCE, stage)] if op is Op.B else []
        row += [] if ahead is None else [Action(Op.RELEASE, stage)]
        row += [] if is_ahead else gather
    return row
