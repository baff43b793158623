"""Report this host's accelerators, processors, NUMA nodes, and related variables. Needs no torch.

[Note: masks]
CUDA reads CUDA_VISIBLE_DEVICES from the left and stops at the first entry that is no device: "0,-1,1" is device 0, and
"" is none. With a duplicate, no device is visible, as in torch. Entries are indexes, GPU UUIDs or unique prefixes of
them, or MIG devices; a process sees at most a single MIG device. HIP reads ROCR_VISIBLE_DEVICES first;
HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, then counts within the devices left.

Sources: CUDA C++ Programming Guide, "Environment Variables"; NVIDIA Multi-Instance GPU User Guide, "Device
Enumeration"; ROCm documentation, "GPU isolation techniques"; torch/cuda/__init__.py, `_parse_visible_devices`.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .host import REPORTED_VARIABLES, Device, HostReport
from .numa import allowed_processors, core_limit, numa_nodes, physical_cores

Kind = Literal["cuda", "hip", "none"]

_NVIDIA_SMI_SECONDS = 30.0  # without a persistence daemon the driver initializes each device first
_GPU_LINE = re.compile(r"GPU (\d+): (.+?) \(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True)
class Visible:
    """The devices that a process may use, in the process's numbering.

    entries: their names in the mask `variable`. nodes: their NUMA nodes.
    """

    variable: str
    entries: tuple[str, ...]
    nodes: tuple[int | None, ...]


def report_host(
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    list_nvidia: Callable[[], str | None] | None = None,
) -> HostReport:
    """Report this host. Takes as long as `nvidia-smi -L`, if that exists.

    environ: None: this process's. root: of /sys, /proc and /dev. list_nvidia: see `find_devices`.
    """
    values = os.environ if environ is None else environ
    kind, devices = find_devices(root, list_nvidia)
    allowed = allowed_processors()
    return HostReport(
        kind=kind,
        devices=devices,
        cores=physical_cores(root, allowed),
        core_limit=core_limit(root),
        nodes=numa_nodes(root, allowed),
        environment={name: values[name] for name in REPORTED_VARIABLES if name in values},
    )


def find_devices(root: Path, list_nvidia: Callable[[], str | None] | None = None) -> tuple[Kind, tuple[Device, ...]]:
    """Return all accelerators of this host by index, ignoring masks.

    root: of /proc, /sys and /dev. list_nvidia: returns the output of `nvidia-smi -L`, None if it cannot be run.
    """
    listed = (list_nvidia or nvidia_smi)()
    if nvidia := _nvidia(root, listed):
        return "cuda", nvidia
    if amd := _amd(root):
        return "hip", amd
    return "none", ()


def nvidia_smi() -> str | None:
    """Return the output of `nvidia-smi -L`; None without the program or a driver, or after _NVIDIA_SMI_SECONDS."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def visible(kind: Kind, devices: Sequence[Device], environment: Mapping[str, str]) -> Visible:
    """Return the devices that the masks in `environment` leave. See [Note: masks]."""
    if kind == "hip":
        return _visible_to_hip(devices, environment)
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    entries = [device.identities[0] for device in devices] if mask is None else _split(mask)
    chosen = _resolve(entries, devices)
    cut = [(entry, device) for entry, device in chosen if device.parts]
    if cut:
        entry, device = cut[0]
        # CUDA lets a process use a single MIG device. If the mask names the whole device, it is the first part.
        chosen = [(entry if entry.startswith("MIG-") else device.parts[0], device)]
    # Without a fixed order CUDA puts the fastest device first, so an index does not tell the NUMA node.
    known = (
        len({device.name for device in devices}) == 1
        or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        or not any(entry.isdigit() for entry, _ in chosen)
    )
    nodes = tuple(device.node if known else None for _, device in chosen)
    return Visible("CUDA_VISIBLE_DEVICES", tuple(entry for entry, _ in chosen), nodes)


def _visible_to_hip(devices: Sequence[Device], environment: Mapping[str, str]) -> Visible:
    outer = environment.get("ROCR_VISIBLE_DEVICES")
    left = list(devices) if outer is None else [device for _, device in _resolve(_split(outer), devices)]
    # HIP counts within the devices that ROCR_VISIBLE_DEVICES leaves, from 0.
    within = [
        Device((str(index), *device.identities[1:]), device.name, device.node) for index, device in enumerate(left)
    ]
    set_here = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environment]
    # HIP prefers the first of the two. The mask goes into the variable that HIP reads, or it would have no effect.
    variable = set_here[0] if set_here else "HIP_VISIBLE_DEVICES"
    entries = _split(environment[variable]) if set_here else [device.identities[0] for device in within]
    chosen = _resolve(entries, within)
    return Visible(variable, tuple(entry for entry, _ in chosen), tuple(device.node for _, device in chosen))


def _split(mask: str) -> list[str]:
    return [entry.strip() for entry in mask.split(",")] if mask.strip() else []


def _resolve(entries: Sequence[str], devices: Sequence[Device]) -> list[tuple[str, Device]]:
    """Return (entry, device) up to the first invalid entry; nothing if a device appears twice."""
    chosen: list[tuple[str, Device]] = []
    for entry in entries:
        device = _device_of(entry, devices)
        if device is None:
            break
        chosen.append((entry, device))
    # Two parts of a device count as two devices, two names of a device as the same device.
    keys = [entry if entry.startswith("MIG-") else device.identities[0] for entry, device in chosen]
    return chosen if len(set(keys)) == len(keys) else []


def _device_of(entry: str, devices: Sequence[Device]) -> Device | None:
    if entry.startswith("MIG-"):
        # Also the older form MIG-GPU-<uuid>/<gpu instance>/<compute instance>, which `nvidia-smi -L` does not print.
        parent = entry.removeprefix("MIG-").partition("/")[0]
        owners = [d for d in devices if any(part.startswith(entry) for part in d.parts) or parent in d.identities]
        return owners[0] if len(owners) == 1 else None
    if entry.isascii() and entry.isdigit():
        return next((device for device in devices if device.identities[0] == str(int(entry))), None)
    found = [d for d in devices if entry and any(identity.startswith(entry) for identity in d.identities[1:])]
    return found[0] if len(found) == 1 else None


def _nvidia(root: Path, listed: str | None) -> tuple[Device, ...]:
    files = _nvidia_files(root)
    if listed is not None:
        return _from_listing(root, listed, files)
    # Without nvidia-smi, for example in a slim container: the driver's files are in the order of the PCI addresses.
    if files:
        return tuple(
            Device((str(index), *([uuid] if uuid else [])), name, _pci_node(root, bus))
            for index, (uuid, name, bus) in enumerate(files)
        )
    # The last resort: names are unknown, and so are the NUMA nodes.
    nodes = sorted(int(path.name[6:]) for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return tuple(Device((str(index),), "NVIDIA GPU") for index in range(len(nodes)))


def _from_listing(root: Path, listed: str, files: Sequence[tuple[str, str, str]]) -> tuple[Device, ...]:
    bus_of = {uuid: bus for uuid, _, bus in files}
    devices: list[Device] = []
    for line in listed.splitlines():
        if match := _GPU_LINE.match(line):
            index, name, uuid = match.groups()
            devices.append(Device((index, uuid), name, _pci_node(root, bus_of.get(uuid, ""))))
        elif (match := _MIG_LINE.match(line)) and devices:
            last = devices[-1]
            devices[-1] = Device(last.identities, last.name, last.node, (*last.parts, match[1]))
    return tuple(devices)


def _nvidia_files(root: Path) -> list[tuple[str, str, str]]:
    """Return (UUID, name, PCI address) of each device by address, from the driver's files."""
    found: list[tuple[str, str, str]] = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        found.append((fields.get("GPU UUID", ""), fields.get("Model", "NVIDIA GPU"), path.parent.name))
    return found


def _amd(root: Path) -> tuple[Device, ...]:
    """Return nodes of the kernel's compute driver with SIMD units whose device file exists (not so in a container)."""
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    devices: list[Device] = []
    # By number: as text, "10" would come before "2".
    for path in sorted(folder.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words = [line.split() for line in (path / "properties").read_text(encoding="utf-8").splitlines()]
        except OSError:
            continue
        values = {word[0]: int(word[1]) for word in words if len(word) == 2 and word[1].isdigit()}
        if not values.get("simd_count") or not (root / f"dev/dri/renderD{values.get('drm_render_minor')}").exists():
            continue
        location = values.get("location_id", 0)
        # location_id is the kernel's bus << 8 | device << 3 | function.
        bus = f"{values.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}"
        uuid = [f"GPU-{values['unique_id']:016x}"] if values.get("unique_id") else []
        version = values.get("gfx_target_version", 0)
        # gfx_target_version is decimal, 90010 for gfx90a: the step is written in hexadecimal.
        name = f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        devices.append(Device((str(len(devices)), *uuid), name, _pci_node(root, bus)))
    return tuple(devices)


def _pci_node(root: Path, address: str) -> int | None:
    """Return the NUMA node of a PCI device; None if unknown (-1)."""
    try:
        node = int((root / "sys/bus/pci/devices" / address.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
