"""GPipe: all forwards, then all backwards. Source: arXiv 1811.06965."""

from .action import Action, Op
from .schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage a rank, every microbatch in flight at once.

    Bubble: (p - 1) / (m + p - 1) of the total. Activations: those of m microbatches on every rank.
    """
    microbatches = range(num_microbatches)
    return Schedule(
        name="gpipe",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(range(num_ranks)),
        actions=tuple(
            tuple(Action(op, rank, microbatch) for op in (Op.F, Op.B) for microbatch in microbatches)
            for rank in range(num_ranks)
        ),
    )
