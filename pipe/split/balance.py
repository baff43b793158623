"""Which blocks go to which stage: contiguous parts with the smallest possible largest cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

_Cost = Callable[[int, int, int], float]  # of a stage that has blocks begin..end


def partition(costs: Sequence[float], num_stages: int, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Numbers of blocks per stage, at least one each, so that the cost of the costliest stage is the least possible.

    costs: of each block, not negative.  first, last: what the first and the last stage have to bear beside their
    blocks. Among the partitions with that largest cost it is one with the least sum of squares, so the rest is even
    too. Exact, O(blocks^2 x stages).
    Raises ValueError for more stages than blocks.
    """
    check_stages(len(costs), num_stages)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)

    limit = _smallest_limit(len(costs), num_stages, cost)
    return _most_even(len(costs), num_stages, cost, limit * (1 + 1e-12))  # sums are rounded


def given_counts(counts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """An explicit list of numbers of blocks per stage, checked. Raises ValueError where it does not fit."""
    shown = " + ".join(str(count) for count in counts)
    if len(counts) != num_stages:
        raise ValueError(
            f"pipeline: expected one number of blocks for each of {num_stages} stages, found {len(counts)}: "
            f"{list(counts)}"
        )
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ValueError(f"pipeline: expected at least one block for each stage, found {list(counts)}")
    if sum(counts) != num_blocks:
        raise ValueError(
            f"pipeline: the numbers of blocks per stage must add up to the model's blocks: {shown} = {sum(counts)} != "
            f"{num_blocks}"
        )
    return tuple(counts)


def check_stages(num_blocks: int, num_stages: int) -> None:
    """Raises ValueError unless every stage can have a block."""
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(
            f"pipeline: expected 1 to {num_blocks} stages, since the model has {num_blocks} blocks and each stage "
            f"needs one, found {num_stages}; ask for fewer stages (ranks x chunks), or a model with more blocks"
        )


def _smallest_limit(num_blocks: int, num_stages: int, cost: _Cost) -> float:
    """The least possible cost of the costliest stage."""
    best = [cost(0, 0, end) if end else float("inf") for end in range(num_blocks + 1)]
    for stage in range(1, num_stages):
        following = [float("inf")] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks + 1):
            for begin in range(end - 1, stage - 1, -1):
                own = cost(stage, begin, end)
                if own >= following[end]:
                    break  # an earlier begin costs at least as much
                following[end] = min(following[end], max(best[begin], own))
        best = following
    return best[num_blocks]


def _most_even(num_blocks: int, num_stages: int, cost: _Cost, limit: float) -> tuple[int, ...]:
    """The partition of least sum of squares among those in which no stage costs more than `limit`."""
    infinite = float("inf")
    best = [cost(0, 0, end) ** 2 if end and cost(0, 0, end) <= limit else infinite for end in range(num_blocks + 1)]
    begins: list[list[int]] = [[0] * (num_blocks + 1)]
    for stage in range(1, num_stages):
        following, chosen = [infinite] * (num_blocks + 1), [0] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks + 1):
            for begin in range(end - 1, stage - 1, -1):
                own = cost(stage, begin, end)
                if own > limit:
                    break
                if best[begin] + own**2 < following[end]:
                    following[end], chosen[end] = best[begin] + own**2, begin
        best = following
        begins.append(chosen)
    counts, end = [], num_blocks
    for chosen in reversed(begins):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts))
