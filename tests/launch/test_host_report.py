"""What a host has, read from made-up files: accelerators and masks, processors and nodes, quotas, free memory."""

import os
from pathlib import Path

import psutil
import pytest

from lowtide.launch.hosts import numa
from lowtide.launch.hosts.facts import free_memory_bytes
from lowtide.launch.hosts.host import Device
from lowtide.launch.hosts.numa import core_limit, numa_nodes, own_cores, physical_cores, rank_nodes, split
from lowtide.launch.hosts.report import Visible, find_devices, report_host, visible

Files = dict[str, str]


def write(root: Path, files: Files) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- accelerators ---------------------------------------------------------------------------------------------------

LISTING = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5bffff-bbbb)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-77aa0000-cccc)
"""
MIG_LISTING = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa0000)
"""
NAME = "NVIDIA H100 80GB HBM3"
UUIDS = ("GPU-5d5ba0d6-aaaa", "GPU-5d5bffff-bbbb", "GPU-77aa0000-cccc", "GPU-88")
H100 = tuple(Device((str(index), uuid), NAME, index // 2) for index, uuid in enumerate(UUIDS))
MIG = (Device(("0", "GPU-5d5ba0d6"), "A100", 0, ("MIG-c6d4f1ef", "MIG-cba663e8")), Device(("1", "GPU-77"), "A100", 1))
AMD = tuple(Device((str(index), f"GPU-{index}a"), "AMD gfx942", index) for index in range(4))
UNLIKE = (Device(("0", "GPU-a"), "T4", 0), Device(("1", "GPU-b"), "A100", 1))


def nvidia(bus: str, uuid: str, node: int) -> Files:
    """The files of a device, as its driver and the system have them."""
    text = f"Model: \t\t {NAME}\nIRQ:   \t\t 72\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
    information = f"proc/driver/nvidia/gpus/{bus}/information"
    return {information: text, f"sys/bus/pci/devices/{bus}/numa_node": f"{node}\n"}


def kfd(node: int, **values: int) -> Files:
    text = "".join(f"{name} {value}\n" for name, value in values.items())
    return {f"sys/class/kfd/kfd/topology/nodes/{node}/properties": text}


SIMD = {"simd_count": 1216, "gfx_target_version": 90402, "domain": 0}
THREE_NVIDIA = nvidia("0000:97:00.0", UUIDS[2], 1) | nvidia("0000:19:00.0", UUIDS[0], 0)
THREE_NVIDIA |= nvidia("0000:3b:00.0", UUIDS[1], -1)
DEVICE_FILES = ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset")
AMD_FILES = (
    kfd(0, cpu_cores_count=64, simd_count=0)
    | kfd(10, **SIMD, drm_render_minor=130, location_id=0xC500, unique_id=0xABC)
    | kfd(2, **SIMD, drm_render_minor=128, location_id=0x2908, unique_id=0)
    | kfd(3, **SIMD, drm_render_minor=129, location_id=0x3000)  # which has no file in /dev
    | {"dev/dri/renderD128": "", "dev/dri/renderD130": ""}
    | {"sys/bus/pci/devices/0000:c5:00.0/numa_node": "1\n", "sys/bus/pci/devices/0000:29:01.0/numa_node": "0\n"}
)


@pytest.mark.parametrize(
    ("files", "listing", "kind", "devices"),
    [
        (
            THREE_NVIDIA,
            LISTING,
            "cuda",
            tuple(Device((str(index), UUIDS[index]), NAME, node) for index, node in enumerate((0, None, 1))),
        ),
        (
            nvidia("0000:97:00.0", "GPU-b", 1) | nvidia("0000:19:00.0", "GPU-a", 0),
            None,
            "cuda",
            (Device(("0", "GPU-a"), NAME, 0), Device(("1", "GPU-b"), NAME, 1)),
        ),
        (nvidia("0000:19:00.0", "GPU-a", 0), "No devices found.\n", "none", ()),  # none that may be opened
        (
            AMD_FILES,
            None,
            "hip",
            (Device(("0",), "AMD gfx942", 0), Device(("1", f"GPU-{0xABC:016x}"), "AMD gfx942", 1)),
        ),
        ({}, None, "none", ()),
    ],
    ids=["nvidia-smi", "driver", "none_opens", "amd", "none"],
)
def test_accelerators_are_found(
    tmp_path: Path, files: Files, listing: str | None, kind: str, devices: tuple[Device, ...]
) -> None:
    assert find_devices(write(tmp_path, files), lambda: listing) == (kind, devices)


def test_without_a_driver_the_device_files_are_counted(tmp_path: Path) -> None:
    _, devices = find_devices(write(tmp_path, {f"dev/{name}": "" for name in DEVICE_FILES}), lambda: None)
    assert [device.identities for device in devices] == [("0",), ("1",), ("2",)]


def test_parts_of_a_device_are_read() -> None:
    _, devices = find_devices(Path("/no/such"), lambda: MIG_LISTING)
    assert [device.parts for device in devices] == [("MIG-c6d4f1ef", "MIG-cba663e8"), ()]


@pytest.mark.parametrize(
    ("devices", "mask", "entries"),
    [
        (H100, None, ("0", "1", "2", "3")),
        (H100, "", ()),
        (H100, "2,0", ("2", "0")),
        (H100, " 1 , 3 ", ("1", "3")),
        (H100, "0,-1,1", ("0",)),
        (H100, "-1", ()),
        (H100, "7", ()),
        (H100, "1,1", ()),
        (H100, "GPU-77aa0000-cccc,GPU-5d5ba", ("GPU-77aa0000-cccc", "GPU-5d5ba")),
        (H100, "GPU-5d5b", ()),  # the beginning of two
        (H100, "GPU-zz", ()),
        (H100, "0,GPU-5d5ba", ()),  # the same twice
        (H100, "NoDevFiles", ()),
        # A process sees one part of a device only.
        (MIG, None, ("MIG-c6d4f1ef",)),
        (MIG, "MIG-cba663e8", ("MIG-cba663e8",)),
        (MIG, "MIG-cba663e8,MIG-c6d4f1ef", ("MIG-cba663e8",)),
        (MIG, "MIG-GPU-5d5ba0d6/2/0", ("MIG-GPU-5d5ba0d6/2/0",)),
        (MIG, "0", ("MIG-c6d4f1ef",)),
        (MIG, "1", ("1",)),
        (MIG, "1,0", ("MIG-c6d4f1ef",)),
        (MIG, "MIG-zz", ()),
    ],
)
def test_a_mask_is_read_as_cuda_reads_it(
    devices: tuple[Device, ...], mask: str | None, entries: tuple[str, ...]
) -> None:
    seen = visible("cuda", devices, {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert (seen.variable, seen.entries) == ("CUDA_VISIBLE_DEVICES", entries)


@pytest.mark.parametrize(
    ("devices", "environment", "nodes"),
    [
        (H100, {"CUDA_VISIBLE_DEVICES": "3,0"}, (1, 0)),
        (UNLIKE, {}, (None, None)),  # CUDA numbers them in an order of its own
        (UNLIKE, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (0, 1)),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, (1, 0)),
    ],
)
def test_nodes_follow_the_mask(devices: tuple[Device, ...], environment: Files, nodes: tuple[int | None, ...]) -> None:
    assert visible("cuda", devices, environment).nodes == nodes


@pytest.mark.parametrize(
    ("environment", "variable", "entries", "nodes"),
    [
        ({}, "HIP", ("0", "1", "2", "3"), (0, 1, 2, 3)),
        ({"ROCR_VISIBLE_DEVICES": "3,GPU-1"}, "HIP", ("0", "1"), (3, 1)),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, "HIP", ("1",), (1,)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "CUDA", ("2",), (2,)),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, "HIP", ("2",), (2,)),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP", (), ()),
    ],
)
def test_masks_of_amd_count_within_each_other(
    environment: Files, variable: str, entries: tuple[str, ...], nodes: tuple[int, ...]
) -> None:
    assert visible("hip", AMD, environment) == Visible(f"{variable}_VISIBLE_DEVICES", entries, nodes)


# -- processors -----------------------------------------------------------------------------------------------------

FOUR = ((0, 4), (1, 5), (2, 6), (3, 7))  # four cores of two threads
NODES = {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}
PROCESSORS = {
    f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list": f"{group[0]},{group[1]}\n"
    for group in FOUR
    for processor in group
}
PROCESSORS |= {
    f"sys/devices/system/node/node{node}/cpulist": f"{processors}\n"
    for node, processors in enumerate(("0-1,4-5", "2-3,6-7", ""))  # the last has memory alone
}


@pytest.mark.parametrize(
    ("files", "allowed", "cores", "nodes"),
    [
        (PROCESSORS, range(8), FOUR, NODES),
        (PROCESSORS, (0, 1, 2, 3), ((0,), (1,), (2,), (3,)), {0: (0, 1), 1: (2, 3)}),
        (PROCESSORS, (1, 4, 5), ((1, 5), (4,)), {0: (1, 4, 5)}),
        ({}, (2, 0), ((0,), (2,)), {}),
    ],
)
def test_threads_of_a_core_and_cores_of_a_node_go_together_as_far_as_they_are_allowed(
    tmp_path: Path,
    files: Files,
    allowed: tuple[int, ...],
    cores: tuple[tuple[int, ...], ...],
    nodes: dict[int, tuple[int, ...]],
) -> None:
    root = write(tmp_path, files)
    assert physical_cores(root, tuple(allowed)) == cores and numa_nodes(root, tuple(allowed)) == nodes


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
def test_a_quota_of_the_control_groups_is_a_limit(tmp_path: Path, files: Files, limit: int | None) -> None:
    assert core_limit(write(tmp_path, files)) == limit


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


def test_ranks_share_the_cores_of_their_node_or_all_share_all() -> None:
    assert own_cores(FOUR, [1, 0, 1], NODES) == [(2, 6), (0, 1, 4, 5), (3, 7)]
    assert own_cores(FOUR, [1, None], NODES) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_report_keeps_within_the_mask_and_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, PROCESSORS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 6})
    report = report_host({"CUDA_VISIBLE_DEVICES": "1", "HOME": "/root"}, tmp_path, lambda: None)
    assert (report.kind, report.devices) == ("none", ())
    assert report.cores == ((0, 4), (1,), (6,)) and report.nodes == {0: (0, 1, 4), 1: (6,)}
    assert report.environment == {"CUDA_VISIBLE_DEVICES": "1"} and report.num_cores == 4
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert report_host({}, tmp_path, lambda: None).num_cores == 3


def test_this_machine_can_be_reported() -> None:
    assert {processor for group in report_host().cores for processor in group} == set(numa.allowed_processors())


# -- free memory ----------------------------------------------------------------------------------------------------


def group(path: str, limit: str, usage: int, cache: int) -> Files:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 7\n"
    return {f"{path}/memory.max": limit, f"{path}/memory.current": str(usage), f"{path}/memory.stat": stat}


FIRST_VERSION = {
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "650",
    "sys/fs/cgroup/memory/job/memory.stat": "cache 9\ntotal_inactive_file 20\n",
}


@pytest.mark.parametrize(
    ("own_group", "files", "expected"),
    [
        ("", {}, 1000),
        (
            "0::/job/step\n",
            group("sys/fs/cgroup/job", "900", 500, 100) | group("sys/fs/cgroup/job/step", "max", 300, 0),
            900 - 500 + 100,
        ),
        ("0::/outer/container\n", group("sys/fs/cgroup", "300", 200, 0), 100),  # the mounted root is the container's
        ("5:cpu,cpuacct:/job\n4:memory:/job\n", FIRST_VERSION, 70),
        ("0::/\n", group("sys/fs/cgroup", "100", 200, 0), 0),
    ],
    ids=["none", "the_tightest", "container", "first_version", "exceeded"],
)
def test_free_memory_is_the_systems_or_less_where_a_control_group_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_group: str, files: Files, expected: int
) -> None:
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert free_memory_bytes(write(tmp_path, {"proc/self/cgroup": own_group} | files)) == expected
