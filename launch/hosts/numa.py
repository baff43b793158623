"""The processors that this host may use, and their distribution over the ranks."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .names import parse_numbers

Cores = tuple[tuple[int, ...], ...]  # logical processors, grouped by physical core


def allowed_processors() -> tuple[int, ...]:
    """Return the logical processors that this process may use, limited by inherited masks and cpusets."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(root: Path, allowed: Sequence[int]) -> Cores:
    """Group `allowed` by physical core, in the order of their first processor. Without /sys each is a group."""
    left, groups = set(allowed), []
    for processor in sorted(allowed):
        if processor not in left:
            continue
        file = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        # A mask may allow only a part of a core's threads.
        group = tuple(sorted({processor, *_read_list(file)} & left))
        left -= set(group)
        groups.append(group)
    return tuple(groups)


def numa_nodes(root: Path, allowed: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return NUMA node -> its processors in `allowed`, without empty nodes; {} if /sys does not tell."""
    nodes: dict[int, tuple[int, ...]] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        processors = tuple(sorted(set(_read_list(path / "cpulist")) & set(allowed)))
        if processors and path.name[4:].isdigit():
            nodes[int(path.name[4:])] = processors
    return dict(sorted(nodes.items()))


def core_limit(root: Path) -> int | None:
    """Return how many processors this process's control groups let it keep busy, rounded up; None: no limit.

    Containers have a quota (`docker --cpus`, `limits.cpu` of a pod) without a mask. Sources: the kernel's
    cgroup-v2.rst, "cpu.max"; sched-bwc.rst for version 1.
    """
    limits = [limit for folder, _ in control_groups(root, "cpu") if (limit := _quota(folder)) is not None]
    # Rounded up: with a quota of 1.5 processors, two threads are busy for three quarters of the time.
    return max(1, math.ceil(min(limits))) if limits else None


def split(cores: Cores, count: int) -> list[tuple[int, ...]]:
    """Split `cores` into `count` contiguous pieces. The first pieces are larger if they do not divide evenly.

    With fewer cores than pieces, all pieces are empty.
    """
    # Sharing a core between bound ranks is worse than letting the kernel move them.
    if len(cores) < count:
        return [()] * count
    size, rest = divmod(len(cores), count)
    ends = [index * size + min(index, rest) for index in range(count + 1)]
    return [
        tuple(sorted(processor for group in cores[start:end] for processor in group))
        for start, end in itertools.pairwise(ends)
    ]


def rank_nodes(count: int, device_nodes: Sequence[int | None], nodes: Mapping[int, Sequence[int]]) -> list[int | None]:
    """Return the NUMA node of each rank: its device's; without devices, ranks are spread evenly over the nodes."""
    if device_nodes:
        return [node if node in nodes else None for node in device_nodes]
    names = list(nodes)
    # Neighbouring ranks share a node: they exchange the most.
    return [names[index * len(names) // count] if names else None for index in range(count)]


def own_cores(cores: Cores, of_rank: Sequence[int | None], nodes: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """Give each rank a piece of `cores`, on its node if known, without overlap."""
    result: list[tuple[int, ...]] = [()] * len(of_rank)
    # A single unknown node spoils the division by nodes: pieces could overlap.
    if None in of_rank:
        return split(cores, len(of_rank))
    for node in set(of_rank):
        assert node is not None
        ranks = [rank for rank, rank_node in enumerate(of_rank) if rank_node == node]
        # The threads of a core are on the same node, so the first tells for all.
        there = tuple(group for group in cores if group[0] in nodes[node])
        for rank, piece in zip(ranks, split(there, len(ranks)), strict=True):
            result[rank] = piece
    return result


def _read_list(path: Path) -> list[int]:
    """Read a list such as `0-3,8` from /sys; [] without the file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return []
    return parse_numbers(text) if text else []


def control_groups(root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Return this process's control groups for a controller and their parents, innermost first.

    The bool says whether a folder is of version 1. In a container the path may be the host's; then the mounted root is
    the container's group. Without /proc, returns that root alone.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    folders: list[tuple[Path, bool]] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        # A line of version 2 names no controller, and its group has all of them.
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        group = Path(path.strip("/"))
        folders += [(base / inner, bool(names)) for inner in (group, *group.parents)]
    return folders


def _quota(folder: Path) -> float | None:
    """Return how many processors a control group may keep busy; None without limit or folder."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() else None  # "max" and -1 mean no limit
