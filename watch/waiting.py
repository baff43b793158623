"""Find the ranks that the job waits for, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from .progress import RankProgress, Wait

Reports = Mapping[int, RankProgress | None]


def who_waits_for_whom(ranks: Reports, hosts: Mapping[int, str] | None = None) -> str:
    """Write the activities of the ranks, grouped, and then the awaited ranks.

    ranks: the newest report of every rank of the job, or None. hosts: the host of each rank, if there are several.
    Example:

        ranks 0-2: after step 12, forward of layers.7: waiting in gather of layers.7 (seq 120) for 31 s
        rank 3: after step 12, data loading for 33 s
        ranks 0-2 wait for rank 3 (host b).
    """
    targets = _targets(ranks)
    return "\n".join([*_activities(ranks), *_conclusions(ranks, targets, hosts or {})])


def stalled(ranks: Reports, limit_seconds: float | None = None) -> list[int]:
    """List the ranks whose step exceeds `limit_seconds`, or else the limit of the rank's config."""
    found = []
    for rank, report in ranks.items():
        if report is None or report.step_seconds is None:
            continue
        limit = report.step_limit_seconds if limit_seconds is None else limit_seconds
        if limit is not None and report.step_seconds > limit:
            found.append(rank)
    return sorted(found)


def _activities(ranks: Reports) -> list[str]:
    groups: dict[str, list[tuple[int, RankProgress]]] = {}
    for rank, report in ranks.items():
        if report is not None:
            groups.setdefault(str(_without_times(report)), []).append((rank, report))
    lines = []
    for members in sorted(groups.values(), key=lambda members: min(rank for rank, _ in members)):
        longest = max((report for _, report in members), key=_seconds)
        lines.append(f"{named(rank for rank, _ in members)}: {longest}")
    silent = [rank for rank, report in ranks.items() if report is None]
    return [*lines, *([f"{named(silent)}: not come to `import lowtide` yet"] if silent else [])]


def _without_times(report: RankProgress) -> RankProgress:
    wait = None if report.wait is None else replace(report.wait, seconds=0.0)
    return replace(report, activity_seconds=0.0, wait=wait)


def _seconds(report: RankProgress) -> float:
    return report.activity_seconds if report.wait is None else report.wait.seconds


def _targets(ranks: Reports) -> dict[int, set[int]]:
    """Return for each rank the ranks that have not reached its collective. A rank beyond it has taken part."""
    late: dict[Wait, set[int]] = {}
    found: dict[int, set[int]] = {}
    for rank, report in ranks.items():
        if report is None or report.wait is None:
            found[rank] = set()
            continue
        # Without the name: ranks that make different calls meet in the same number, which `_different_calls` reports.
        wait = replace(report.wait, what="", seconds=0.0)
        if wait not in late:  # computed once for all ranks in the same collective
            late[wait] = {
                other
                for other in wait.ranks
                if other in ranks and not _is_in(ranks[other], wait) and not _is_past(ranks[other], wait)
            }
        found[rank] = late[wait] - {rank}
    return found


def _is_in(other: RankProgress | None, wait: Wait) -> bool:
    # A message has no number, so nothing shows that its peer takes part.
    if other is None or other.wait is None or not wait.sequence:
        return False
    return (other.wait.channel, other.wait.sequence) == (wait.channel, wait.sequence)


def _is_past(other: RankProgress | None, wait: Wait) -> bool:
    # At the same number the rank has begun the collective, but perhaps not sent its part.
    return other is not None and bool(wait.sequence) and dict(other.begun).get(wait.channel, 0) > wait.sequence


def _conclusions(ranks: Reports, targets: Mapping[int, set[int]], hosts: Mapping[int, str]) -> list[str]:
    """Write a sentence for each set of ranks that hold up other ranks and do not wait, or say why there is none."""
    different = _different_calls(ranks)
    if different:
        return different
    held_up: dict[int, list[int]] = {}  # by rank: the ranks that wait for it, directly or indirectly
    astray = []
    for rank, waited_for in targets.items():
        if waited_for:
            ends = _ends(rank, targets)
            for end in ends:
                held_up.setdefault(end, []).append(rank)
            # A circle: every rank on the way waits.
            if not ends:
                astray.append(rank)
    by_waiters: dict[tuple[int, ...], list[int]] = {}
    for end, waiters in held_up.items():
        by_waiters.setdefault(tuple(sorted(waiters)), []).append(end)
    lines = [
        f"{named(waiters)} {_wait_verb(waiters)} for {_with_hosts(ends, hosts)}."
        for waiters, ends in sorted(by_waiters.items())
    ]
    if astray:
        lines.append(
            f"{named(astray)} wait for each other: no one of them can go on. Do all ranks run the same calls of the "
            "engine in the same order?"
        )
    return lines or [_why_nobody_waits(ranks)]


def _ends(rank: int, targets: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that `rank` waits for, directly or indirectly, and that wait for no rank."""
    seen, todo = {rank}, [rank]
    while todo:
        for other in targets[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return {other for other in seen if not targets[other]}


def _different_calls(ranks: Reports) -> list[str]:
    """Report channels in which ranks have the same sequence number under different names. They can never meet."""
    names: dict[tuple[int, int, int], dict[str, list[int]]] = {}
    for rank, report in ranks.items():
        if report is not None and report.wait is not None and report.wait.sequence:
            wait = report.wait
            # Groups of the same axis share a channel, and their first ranks tell them apart.
            names.setdefault((wait.channel, wait.sequence, wait.first), {}).setdefault(wait.what, []).append(rank)
    return [
        f"Collective {sequence} is not the same on all ranks: "
        + "; ".join(f"{named(members)}: {what}" for what, members in found.items())
        + ". Do all ranks run the same calls of the engine in the same order?"
        for (_, sequence, _), found in sorted(names.items())
        if len(found) > 1
    ]


def _why_nobody_waits(ranks: Reports) -> str:
    waits = {(report.wait.channel, report.wait.sequence) for report in ranks.values() if report and report.wait}
    if len(waits) == 1 and all(report and report.wait for report in ranks.values()) and len(ranks) > 1:
        return "All ranks are in the same collective: it is the device or the network that does not answer."
    return "No rank waits for another one."


def _wait_verb(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _with_hosts(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    on = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks) if rank in hosts))
    if not on:
        return named(ranks)
    return f"{named(ranks)} (host{'s' if len(on) > 1 else ''} {', '.join(on)})"


def rank_range(ranks: Iterable[int], separator: str = ",") -> str:
    """Format ranks: `0-3,6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named(ranks: Iterable[int]) -> str:
    """Format ranks: `rank 3`, or `ranks 0-2, 5`."""
    members = list(ranks)
    return f"rank{'s' if len(members) > 1 else ''} {rank_range(members, ', ')}"
