"""Rounds of microbatches: how many pass all stages of a rank together, where a rank has several."""

from collections.abc import Sequence

_Visit = tuple[int, int]  # (stage, microbatch)


def even_rounds(num_ranks: int, num_microbatches: int) -> list[int]:
    """Round sizes of at least `num_ranks`, as even as can be, the larger ones first: 4 ranks, 10 microbatches: 5, 5.

    With p in a round, the second stage of a rank can take the first microbatch when its first stage has done the last.
    Fewer than p make every rank wait in each round, so what is left over goes into the others.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    least, num_larger = divmod(num_microbatches, num_rounds)
    return [least + (index < num_larger) for index in range(num_rounds)]


def full_rounds(num_ranks: int, num_microbatches: int) -> list[int]:
    """Rounds of `num_ranks` and a last one with the rest: 4 ranks, 10 microbatches: 4, 4, 2. The least memory."""
    num_full, rest = divmod(num_microbatches, num_ranks)
    return [num_ranks] * num_full + [rest] * (rest > 0)


def visits(stages: Sequence[int], round_sizes: Sequence[int]) -> tuple[list[_Visit], list[_Visit]]:
    """The (stage, microbatch) of a rank's forwards and of its backwards, each in order: round by round, stage by stage.

    Stages 1 and 3, rounds 2 and 2: forwards 1,0 1,1 3,0 3,1 1,2 1,3 3,2 3,3; backwards 3,0 3,1 1,0 1,1 3,2 3,3 ...
    """
    forwards: list[_Visit] = []
    backwards: list[_Visit] = []
    first = 0
    for size in round_sizes:
        microbatches = range(first, first + size)
        forwards += [(stage, microbatch) for stage in stages for microbatch in microbatches]
        backwards += [(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches]
        first += size
    return forwards, backwards
