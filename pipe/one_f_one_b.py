"""1F1B and interleaved 1F1B: some forwards first, then one forward and one backward by turns."""

from collections.abc import Iterator

from .action import Action, Op
from .schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage a rank; rank r has at most p - r microbatches in flight.

    Bubble: (p - 1) / (m + p - 1) of the total, as GPipe. Source: PipeDream-Flush, arXiv 2006.09503; arXiv 2104.04473.
    """
    ranks = range(num_ranks)
    return Schedule(
        name="1f1b",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(ranks),
        actions=tuple(_by_turns(*visits(rank, num_ranks, num_microbatches, 1), num_ranks - 1 - rank) for rank in ranks),
    )


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """`chunks` stages a rank, placed in turns: stage c * p + r on rank r. Any number of microbatches.

    Bubble: (p - 1) / (v * m) of the time without one, where m is a multiple of p; messages are v times as many.
    Source: Megatron-LM, arXiv 2104.04473, section 2.2.
    """
    ranks = range(num_ranks)
    # Each stage further from the last costs a way there and a way back before the first backward comes.
    warmup = (chunks - 1) * round_sizes(num_ranks, num_microbatches)[0]
    return Schedule(
        name="interleaved",
        num_ranks=num_ranks,
        num_stages=num_ranks * chunks,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(ranks) * chunks,
        actions=tuple(
            _by_turns(*visits(rank, num_ranks, num_microbatches, chunks), warmup + 2 * (num_ranks - 1 - rank))
            for rank in ranks
        ),
    )


def round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """How many microbatches pass all chunks together, for each round: at least p where there are as many.

    With p in a round, chunk c + 1 of the first microbatch is ready when chunk c of the last has been done.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    least, larger = divmod(num_microbatches, num_rounds)
    return [least + (index < larger) for index in range(num_rounds)]


def visits(
    rank: int, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (stage, microbatch) of a rank's forwards and of its backwards, each in order: round by round, chunk by chunk.

    Rank 1 of 2, 4 microbatches, 2 chunks: forwards 1,0 1,1 3,0 3,1 1,2 1,3 3,2 3,3; backwards 3,0 3,1 1,0 1,1 3,2 ...
    """
    stages = range(rank, num_ranks * chunks, num_ranks)
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    first = 0
    for size in round_sizes(num_ranks, num_microbatches):
        microbatches = range(first, first + size)
        forwards += [(stage, microbatch) for stage in stages for microbatch in microbatches]
        backwards += [(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches]
        first += size
    return forwards, backwards


def _by_turns(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], num_warmup: int
) -> tuple[Action, ...]:
    """`num_warmup` forwards, then a forward and a backward by turns, then the backwards that are left."""

    def actions() -> Iterator[Action]:
        warmup = min(num_warmup, len(forwards))
        yield from (Action(Op.F, *visit) for visit in forwards[:warmup])
        for index, visit in enumerate(backwards):
            if warmup + index < len(forwards):
                yield Action(Op.F, *forwards[warmup + index])
            yield Action(Op.B, *visit)

    return tuple(actions())
