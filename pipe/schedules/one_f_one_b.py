"""1F1B and interleaved 1F1B: some forwards first, then one forward and one backward by turns."""

from collections.abc import Sequence

from .action import Action, Op
from .rounds import even_rounds, visits
from .schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage a rank; rank r has at most p - r microbatches in flight.

    Bubble: (p - 1) / (m + p - 1) of the total, as GPipe. Source: PipeDream-Flush, arXiv 2006.09503.
    """
    return _looped("1f1b", num_ranks, [num_microbatches], chunks=1, actions_per_hop=1)


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """`chunks` stages a rank, placed in turns: stage c * p + r on rank r. Any number of microbatches.

    Bubble: (p - 1) / (v * m) of the time without one, where m is a multiple of p; messages are v times as many.
    Source: Megatron-LM, arXiv 2104.04473, section 2.2.
    """
    # Two forwards more for each rank before the last: the way of a microbatch there, and of its gradient back.
    round_sizes = even_rounds(num_ranks, num_microbatches)
    return _looped("interleaved", num_ranks, round_sizes, chunks, actions_per_hop=2)


def _looped(name: str, num_ranks: int, round_sizes: Sequence[int], chunks: int, actions_per_hop: int) -> Schedule:
    num_stages = num_ranks * chunks
    actions = []
    for rank in range(num_ranks):
        forwards, backwards = visits(range(rank, num_stages, num_ranks), round_sizes)
        warmup = (chunks - 1) * round_sizes[0] + actions_per_hop * (num_ranks - 1 - rank)
        actions.append(_by_turns(forwards, backwards, min(warmup, len(forwards))))
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=sum(round_sizes),
        rank_of_stage=tuple(range(num_ranks)) * chunks,
        actions=tuple(actions),
    )


def _by_turns(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then a forward and a backward by turns, then the backwards that are left."""
    actions = [Action(Op.F, *visit) for visit in forwards[:warmup]]
    for index, visit in enumerate(backwards):
        if warmup + index < len(forwards):
            actions.append(Action(Op.F, *forwards[warmup + index]))
        actions.append(Action(Op.B, *visit))
    return tuple(actions)
