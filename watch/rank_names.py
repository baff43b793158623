"""Many ranks in few words."""

from collections.abc import Iterable


def rank_range(ranks: Iterable[int], separator: str = ",") -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    members = list(ranks)
    return f"rank{'s' if len(members) > 1 else ''} {rank_range(members, ', ')}"
