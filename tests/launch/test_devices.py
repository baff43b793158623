"""Accelerators of a host, found in made-up files and listings, and what masks leave of them."""

from pathlib import Path

import pytest

from lowtide.launch.hosts.host import Device
from lowtide.launch.hosts.report import Visible, find_devices, visible

LISTING = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5bffff-bbbb)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-77aa0000-cccc)
"""
MIG_LISTING = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa0000)
"""
H100 = tuple(
    Device((str(index), uuid), "NVIDIA H100 80GB HBM3", index // 2)
    for index, uuid in enumerate(("GPU-5d5ba0d6-aaaa", "GPU-5d5bffff-bbbb", "GPU-77aa0000-cccc", "GPU-88"))
)
MIG = (Device(("0", "GPU-5d5ba0d6"), "A100", 0, ("MIG-c6d4f1ef", "MIG-cba663e8")), Device(("1", "GPU-77"), "A100", 1))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_nvidia(root: Path, bus: str, uuid: str, node: int) -> None:
    text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 72\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
    write(root / "proc/driver/nvidia/gpus" / bus / "information", text)
    write(root / "sys/bus/pci/devices" / bus / "numa_node", f"{node}\n")


def test_nvidia_smi_gives_the_devices_and_the_driver_their_nodes(tmp_path: Path) -> None:
    add_nvidia(tmp_path, "0000:97:00.0", "GPU-77aa0000-cccc", 1)
    add_nvidia(tmp_path, "0000:19:00.0", "GPU-5d5ba0d6-aaaa", 0)
    add_nvidia(tmp_path, "0000:3b:00.0", "GPU-5d5bffff-bbbb", -1)
    kind, devices = find_devices(tmp_path, lambda: LISTING)
    assert kind == "cuda"
    assert [device.identities for device in devices] == [
        ("0", "GPU-5d5ba0d6-aaaa"),
        ("1", "GPU-5d5bffff-bbbb"),
        ("2", "GPU-77aa0000-cccc"),
    ]
    assert [device.node for device in devices] == [0, None, 1]
    assert {device.name for device in devices} == {"NVIDIA H100 80GB HBM3"}


def test_parts_of_a_device_are_read() -> None:
    _, devices = find_devices(Path("/no/such"), lambda: MIG_LISTING)
    assert [device.parts for device in devices] == [("MIG-c6d4f1ef", "MIG-cba663e8"), ()]


def test_without_nvidia_smi_the_files_of_the_driver_are_read(tmp_path: Path) -> None:
    add_nvidia(tmp_path, "0000:97:00.0", "GPU-b", 1)
    add_nvidia(tmp_path, "0000:19:00.0", "GPU-a", 0)
    assert find_devices(tmp_path, lambda: None) == (
        "cuda",
        (Device(("0", "GPU-a"), "NVIDIA H100 80GB HBM3", 0), Device(("1", "GPU-b"), "NVIDIA H100 80GB HBM3", 1)),
    )


def test_without_these_the_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        write(tmp_path / "dev" / name, "")
    _, devices = find_devices(tmp_path, lambda: None)
    assert [device.identities for device in devices] == [("0",), ("1",), ("2",)]


def test_no_devices_that_may_be_opened_are_none_though_the_driver_lists_some(tmp_path: Path) -> None:
    add_nvidia(tmp_path, "0000:19:00.0", "GPU-a", 0)
    assert find_devices(tmp_path, lambda: "No devices found.\n") == ("none", ())


def add_kfd(root: Path, node: int, **values: int) -> None:
    text = "".join(f"{name} {value}\n" for name, value in values.items())
    write(root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties", text)


def test_devices_of_amd_are_those_with_simd_units_and_a_file(tmp_path: Path) -> None:
    add_kfd(tmp_path, 0, cpu_cores_count=64, simd_count=0)
    common = {"simd_count": 1216, "gfx_target_version": 90402, "domain": 0}
    add_kfd(tmp_path, 10, **common, drm_render_minor=130, location_id=0xC500, unique_id=0xABC)
    add_kfd(tmp_path, 2, **common, drm_render_minor=128, location_id=0x2908, unique_id=0)
    add_kfd(tmp_path, 3, **common, drm_render_minor=129, location_id=0x3000)
    for minor in (128, 130):
        write(tmp_path / f"dev/dri/renderD{minor}", "")
    write(tmp_path / "sys/bus/pci/devices/0000:c5:00.0/numa_node", "1\n")
    write(tmp_path / "sys/bus/pci/devices/0000:29:01.0/numa_node", "0\n")
    assert find_devices(tmp_path, lambda: None) == (
        "hip",
        (
            Device(("0",), "AMD gfx942", 0),
            Device(("1", "GPU-0000000000000abc"), "AMD gfx942", 1),
        ),
    )


def test_a_host_without_accelerators_has_none(tmp_path: Path) -> None:
    assert find_devices(tmp_path, lambda: None) == ("none", ())


@pytest.mark.parametrize(
    ("mask", "entries"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        (" ", ()),
        ("2,0", ("2", "0")),
        (" 1 , 3 ", ("1", "3")),
        ("0,-1,1", ("0",)),
        ("-1", ()),
        ("7", ()),
        ("0,9,1", ("0",)),
        ("1,1", ()),
        ("GPU-77aa0000-cccc,GPU-5d5ba", ("GPU-77aa0000-cccc", "GPU-5d5ba")),
        ("GPU-5d5b", ()),  # the beginning of two
        ("GPU-zz", ()),
        ("0,GPU-5d5ba", ()),  # the same twice
        ("NoDevFiles", ()),
    ],
)
def test_a_mask_is_read_as_cuda_reads_it(mask: str | None, entries: tuple[str, ...]) -> None:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    seen = visible("cuda", H100, environment)
    assert (seen.variable, seen.entries) == ("CUDA_VISIBLE_DEVICES", entries)


@pytest.mark.parametrize(
    ("mask", "entries"),
    [
        (None, ("MIG-c6d4f1ef",)),
        ("MIG-cba663e8", ("MIG-cba663e8",)),
        ("MIG-cba663e8,MIG-c6d4f1ef", ("MIG-cba663e8",)),
        ("MIG-GPU-5d5ba0d6/2/0", ("MIG-GPU-5d5ba0d6/2/0",)),
        ("0", ("MIG-c6d4f1ef",)),
        ("1", ("1",)),
        ("1,0", ("MIG-c6d4f1ef",)),
        ("MIG-zz", ()),
    ],
)
def test_a_process_sees_one_part_only(mask: str | None, entries: tuple[str, ...]) -> None:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert visible("cuda", MIG, environment).entries == entries


def test_nodes_follow_the_mask() -> None:
    assert visible("cuda", H100, {"CUDA_VISIBLE_DEVICES": "3,0"}).nodes == (1, 0)


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        ({}, (None, None)),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (0, 1)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, (1, 0)),
    ],
)
def test_indexes_of_unlike_devices_tell_no_node(environment: dict[str, str], nodes: tuple[int | None, ...]) -> None:
    devices = (Device(("0", "GPU-a"), "T4", 0), Device(("1", "GPU-b"), "A100", 1))
    assert visible("cuda", devices, environment).nodes == nodes


AMD = tuple(Device((str(index), f"GPU-{index}a"), "AMD gfx942", index) for index in range(4))


@pytest.mark.parametrize(
    ("environment", "variable", "entries", "nodes"),
    [
        ({}, "HIP_VISIBLE_DEVICES", ("0", "1", "2", "3"), (0, 1, 2, 3)),
        ({"ROCR_VISIBLE_DEVICES": "3,GPU-1"}, "HIP_VISIBLE_DEVICES", ("0", "1"), (3, 1)),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES", ("1",), (1,)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "CUDA_VISIBLE_DEVICES", ("2",), (2,)),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES", ("2",), (2,)),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES", (), ()),
    ],
)
def test_masks_of_amd_count_within_each_other(
    environment: dict[str, str], variable: str, entries: tuple[str, ...], nodes: tuple[int, ...]
) -> None:
    assert visible("hip", AMD, environment) == Visible(variable, entries, nodes)
