"""Processors, NUMA nodes and quotas of made-up hosts, and how ranks share them."""

import os
from pathlib import Path

import pytest

from lowtide.launch.hosts import numa
from lowtide.launch.hosts.numa import core_limit, numa_nodes, own_cores, physical_cores, rank_nodes, split
from lowtide.launch.hosts.report import report_host

FOUR = ((0, 4), (1, 5), (2, 6), (3, 7))  # four cores of two threads
NODES = {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_processors(root: Path) -> None:
    for group in FOUR:
        for processor in group:
            file = f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
            write(root / file, f"{group[0]},{group[1]}\n")
    write(root / "sys/devices/system/node/node0/cpulist", "0-1,4-5\n")
    write(root / "sys/devices/system/node/node1/cpulist", "2-3,6-7\n")
    write(root / "sys/devices/system/node/node2/cpulist", "\n")  # memory alone


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [
        (range(8), FOUR),
        ((0, 1, 2, 3), ((0,), (1,), (2,), (3,))),
        ((1, 4, 5), ((1, 5), (4,))),
    ],
)
def test_threads_of_a_core_go_together_as_far_as_they_are_allowed(
    tmp_path: Path, allowed: tuple[int, ...], cores: tuple[tuple[int, ...], ...]
) -> None:
    add_processors(tmp_path)
    assert physical_cores(tmp_path, tuple(allowed)) == cores


def test_without_files_each_processor_is_a_core(tmp_path: Path) -> None:
    assert physical_cores(tmp_path, (2, 0)) == ((0,), (2,)) and numa_nodes(tmp_path, (0, 2)) == {}


def test_nodes_have_the_processors_that_are_allowed(tmp_path: Path) -> None:
    add_processors(tmp_path)
    assert numa_nodes(tmp_path, tuple(range(8))) == NODES
    assert numa_nodes(tmp_path, (0, 1)) == {0: (0, 1)}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_a_quota_of_the_control_groups_is_a_limit(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert core_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("count", "pieces"),
    [
        (1, [tuple(range(8))]),
        (2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (3, [(0, 1, 4, 5), (2, 6), (3, 7)]),
        (4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (5, [()] * 5),
    ],
)
def test_each_core_goes_to_one_rank_and_the_rest_to_the_first(count: int, pieces: list[tuple[int, ...]]) -> None:
    assert split(FOUR, count) == pieces


@pytest.mark.parametrize("count", range(1, 8))
def test_no_core_is_left_or_given_twice(count: int) -> None:
    cores = tuple((number,) for number in range(7))
    pieces = split(cores, count)
    assert sorted(processor for piece in pieces for processor in piece) == list(range(7))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize(
    ("count", "device_nodes", "nodes"),
    [
        (4, [0, 0, 1, 1], [0, 0, 1, 1]),
        (2, [1, None], [1, None]),
        (2, [0, 5], [0, None]),
        (4, [], [0, 0, 1, 1]),
        (3, [], [0, 0, 1]),
        (1, [], [0]),
    ],
)
def test_a_rank_is_on_the_node_of_its_device_or_in_turn(
    count: int, device_nodes: list[int | None], nodes: list[int | None]
) -> None:
    assert rank_nodes(count, device_nodes, NODES) == nodes


def test_ranks_share_the_cores_of_their_node() -> None:
    assert own_cores(FOUR, [1, 0, 1], NODES) == [(2, 6), (0, 1, 4, 5), (3, 7)]


def test_a_rank_without_a_node_makes_all_share_all() -> None:
    assert own_cores(FOUR, [1, None], NODES) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_report_keeps_within_the_mask_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_processors(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 6})
    report = report_host({"CUDA_VISIBLE_DEVICES": "1", "HOME": "/root"}, tmp_path, lambda: None)
    assert (report.kind, report.devices) == ("none", ())
    assert report.cores == ((0, 4), (1,), (6,)) and report.nodes == {0: (0, 1, 4), 1: (6,)}
    assert report.environment == {"CUDA_VISIBLE_DEVICES": "1"} and report.num_cores == 4


def test_a_quota_counts_where_it_is_lower_than_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_processors(tmp_path)
    write(tmp_path / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert report_host({}, tmp_path, lambda: None).num_cores == 3


def test_this_machine_can_be_reported() -> None:
    report = report_host()
    assert {processor for group in report.cores for processor in group} == set(numa.allowed_processors())
