"""The processors of this host that may be used, and which of them each rank gets."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .names import parse_numbers

Cores = tuple[tuple[int, ...], ...]  # logical processors, those of one physical core in one group


def allowed_processors() -> tuple[int, ...]:
    """The logical processors that this process may run on: masks and cpusets of those above it count."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(root: Path, allowed: Sequence[int]) -> Cores:
    """`allowed` in groups of one physical core each, in the order of their first; alone where /sys does not tell."""
    left, groups = set(allowed), []
    for processor in sorted(allowed):
        if processor not in left:
            continue
        file = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        group = tuple(sorted({processor, *_read_list(file)} & left))
        left -= set(group)
        groups.append(group)
    return tuple(groups)


def numa_nodes(root: Path, allowed: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """NUMA node -> its processors that are in `allowed`, for nodes that have some; empty where /sys does not tell."""
    nodes: dict[int, tuple[int, ...]] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        processors = tuple(sorted(set(_read_list(path / "cpulist")) & set(allowed)))
        if processors and path.name[4:].isdigit():
            nodes[int(path.name[4:])] = processors
    return dict(sorted(nodes.items()))


def core_limit(root: Path) -> int | None:
    """How many processors the control groups of this process let it keep busy at a time, rounded up; None: no limit.

    Containers have such a quota (`docker --cpus`, `limits.cpu` of a pod) without a mask. Sources: the kernel's
    cgroup-v2.rst, "cpu.max"; sched-bwc.rst for version 1.
    """
    limits = [limit for folder, _ in control_groups(root, "cpu") if (limit := _quota(folder)) is not None]
    return max(1, math.ceil(min(limits))) if limits else None


def split(cores: Cores, count: int) -> list[tuple[int, ...]]:
    """`cores` in `count` pieces next to each other, each core in one; the first ones get what does not divide.

    Without a core for each, no piece has any.
    """
    if len(cores) < count:
        return [()] * count
    size, rest = divmod(len(cores), count)
    ends = [index * size + min(index, rest) for index in range(count + 1)]
    return [
        tuple(sorted(processor for group in cores[start:end] for processor in group))
        for start, end in itertools.pairwise(ends)
    ]


def rank_nodes(count: int, device_nodes: Sequence[int | None], nodes: Mapping[int, Sequence[int]]) -> list[int | None]:
    """The NUMA node of each of `count` ranks: that of its device; without devices, in equal parts over all nodes."""
    if device_nodes:
        return [node if node in nodes else None for node in device_nodes]
    names = list(nodes)
    return [names[index * len(names) // count] if names else None for index in range(count)]


def own_cores(cores: Cores, of_rank: Sequence[int | None], nodes: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """A piece of `cores` for each rank, on its node where it has one: no core twice."""
    result: list[tuple[int, ...]] = [()] * len(of_rank)
    if None in of_rank:
        return split(cores, len(of_rank))
    for node in set(of_rank):
        assert node is not None
        ranks = [rank for rank, its_node in enumerate(of_rank) if its_node == node]
        there = tuple(group for group in cores if group[0] in nodes[node])
        for rank, piece in zip(ranks, split(there, len(ranks)), strict=True):
            result[rank] = piece
    return result


def _read_list(path: Path) -> list[int]:
    """`0-3,8` of a file in /sys; nothing where there is none."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return []
    return parse_numbers(text) if text else []


def control_groups(root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Folders of this process's control groups for a controller and of those above them, the inner ones first.

    The bool says whether a folder is of version 1. In a container the path may be that of the outer system; then the
    mounted root is the container's own group. Where /proc does not tell, that root alone.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    folders: list[tuple[Path, bool]] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        group = Path(path.strip("/"))
        folders += [(base / inner, bool(names)) for inner in (group, *group.parents)]
    return folders


def _quota(folder: Path) -> float | None:
    """Processors that a control group may keep busy; None: no limit, or no such folder."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() else None  # "max" and -1: none
