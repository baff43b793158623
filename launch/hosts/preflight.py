"""Check before the start that all hosts answer, are alike, and have the resources that the plan needs.

The launcher uses it with the agents' `facts.py`:

    requests = [request_for(plan, host, folders, master_port) for host in plan.hosts]     one Check message each
    checked = [HostChecks(host.name, results, report, clock_offset(results, sent, received)), ...]
              HostChecks(host.name, error="Connection refused")                           if there is no answer
    found = faults(plan, checked)
    print(table(checked, found)) and each of `found`; start only if none of them is_fatal

A fault is fatal if the job would certainly fail or hang. All remaining faults are warnings, and the job starts.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...configs.comments import without_comments
from .facts import PACKAGES, CheckRequest, CheckResult
from .host import HostReport
from .names import folded
from .plan import HostPlan, JobPlan

# Above 1 s, logs and files of several hosts are hard to compare. Above 30 s, file systems may refuse tickets.
CLOCK_WARNING_SECONDS = 1.0
CLOCK_FAULT_SECONDS = 30.0
LEAST_RANK_BYTES = 256 << 20  # to import torch
LOW_RANK_BYTES = 1 << 30
LOW_SHARED_BYTES = 128 << 20  # Docker's default is 64 MiB
LOW_LOCKED_BYTES = 1 << 30  # systemd's default is 8 MiB
_CONFIG_BYTES = 1 << 20  # a larger JSON file among the arguments is data


@dataclass(frozen=True)
class HostChecks:
    """A host's answer. Without an answer, results is empty and `error` says why (for example ssh's text).

    clock_offset_seconds: the host's clock minus the launcher's; None: unknown.
    """

    host: str
    results: tuple[CheckResult, ...] = ()
    report: HostReport | None = None
    clock_offset_seconds: float | None = None
    error: str = ""

    def value(self, name: str) -> Any:
        """Return the value of the result `name`, None without it."""
        return next((result.value for result in self.results if result.name == name), None)


@dataclass(frozen=True)
class HostFault:
    """A fault of some hosts; str() is a line with place, expected, found and advice.

    subject: a word for the table. is_fatal: the job would fail, so it does not start. Else it is a warning.
    """

    subject: str
    hosts: tuple[str, ...]
    expected: str
    found: str
    advice: str
    is_fatal: bool = True

    def __str__(self) -> str:
        where = f"{'host' if len(self.hosts) == 1 else 'hosts'} {folded(self.hosts)}"
        return f"{where}: expected {self.expected}, found {self.found}; {self.advice}"


def faults(plan: JobPlan, checked: Sequence[HostChecks]) -> list[HostFault]:
    """Return all faults, fatal faults first. checked: for each host of the plan, in order."""
    there = [host for host in checked if not host.error]
    planned = {host.name: host for host in plan.hosts}
    found = [fault for host in checked if host.error for fault in [_no_answer(plan, host)]]
    found += _differences(there)
    found += _folded(fault for host in there for fault in _own_faults(plan, planned[host.host], host))
    # `sorted` is stable: within each kind, the faults stay in the order of the checks.
    return sorted(found, key=lambda fault: not fault.is_fatal)


def request_for(
    plan: JobPlan, host: HostPlan, folders: Sequence[str] = (), master_port: int | None = None
) -> CheckRequest:
    """Return the request for `host`. folders: `--check-folder` and `folders_of_config`. master_port: of HeldPort."""
    program, *rest = plan.command
    is_module = rest[:1] == ["-m"]
    environment = {**plan.environment, **(host.ranks[0].environment if host.ranks else {})}
    # The agent imports lowtide alone, with -P. The ranks import the script's modules with this path.
    search_path = environment.get("PYTHONPATH", "")
    return CheckRequest(
        num_ranks=len(host.ranks),
        folder=plan.folder,
        program=program,
        script=None if is_module or not rest else rest[0],
        module=rest[1] if is_module else None,
        write_folders=tuple(dict.fromkeys(folders)),
        search_path=tuple(search_path.split(os.pathsep)) if search_path else (),
        master_address=plan.master_address,
        master_port=master_port,
    )


def folders_of_config(arguments: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the nvme_path of every section with "device": "nvme" in the JSON files among a script's arguments.

    arguments: `train.json`, `--config=train.json`. folder: base of relative file names. Ignores files that are missing,
    not JSON, or larger than 1 MiB.
    """
    found: dict[str, None] = {}
    for argument in arguments:
        path = folder / argument.rpartition("=")[2]
        if path.suffix != ".json":
            continue
        try:
            if path.stat().st_size > _CONFIG_BYTES:
                continue
            # As the ranks read it: with comments, or a byte order mark.
            config = json.loads(without_comments(path.read_text(encoding="utf-8-sig")))
        except (OSError, ValueError, RecursionError):
            continue
        found |= dict.fromkeys(_nvme_paths(config))
    return tuple(found)


def _nvme_paths(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _nvme_paths(item)
    if isinstance(node, dict):
        path = node.get("nvme_path")
        # An `nvme_path` of an offload that is off may name a folder that does not exist.
        if isinstance(path, str) and node.get("device") == "nvme":
            yield path
        for item in node.values():
            yield from _nvme_paths(item)


def clock_offset(results: Sequence[CheckResult], sent: float, received: float) -> float | None:
    """Return the host's clock minus the launcher's, in seconds, exact to half of the messages' time.

    sent, received: time.time() of the launcher when it asked, and when this host's answer came. None without a clock in
    `results`. Source: RFC 5905 (NTP), section 8.
    """
    clocks = {result.name: result.value for result in results}
    start, end = clocks.get("clock_start"), clocks.get("clock_end")
    if not isinstance(start, int | float) or not isinstance(end, int | float):
        return None
    return ((start - sent) + (end - received)) / 2


def table(checked: Sequence[HostChecks], found: Sequence[HostFault] = ()) -> str:
    """Return a table with a row for each host: versions, devices, memory, clock, and its faults or "ok"."""
    folders = dict.fromkeys(name for host in checked for name in _folder_names(host))
    heads = ["host", "python", "torch", "lowtide", "devices", "free memory", "/dev/shm", "locked", "clock", "store"]
    rows = [[*heads, *(f"free in {folder}" for folder in folders), "state"]]
    for host in checked:
        ours = [fault for fault in found if host.host in fault.hosts]
        state = ", ".join(dict.fromkeys(fault.subject for fault in ours if fault.is_fatal)) or ", ".join(
            dict.fromkeys(f"({fault.subject})" for fault in ours)
        )
        rows.append(
            [host.host, *_cells(host), *(_bytes(host, f"write_folder {name}") for name in folders), state or "ok"]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(host: HostChecks) -> list[str]:
    versions = [str(host.value(name) or "-") for name in ("python", "torch", "lowtide")]
    devices = (device_names(host) or "none") if host.report is not None else "-"
    free, shared = _bytes(host, "free_memory_bytes"), _bytes(host, "free_shared_memory_bytes")
    clock = "-" if host.clock_offset_seconds is None else f"{host.clock_offset_seconds:+.3f} s"
    reached = host.value("master_port")
    store = "-" if reached is None else f"{1000 * reached:.1f} ms"
    return [*versions, devices, free, shared, _bytes(host, "locked_memory_bytes"), clock, store]


def _bytes(host: HostChecks, name: str) -> str:
    value = host.value(name)
    return size_text(value) if isinstance(value, int) else str(value or "-")


def _folder_names(host: HostChecks) -> list[str]:
    prefix = "write_folder "
    return [result.name.removeprefix(prefix) for result in host.results if result.name.startswith(prefix)]


def _no_answer(plan: JobPlan, host: HostChecks) -> HostFault:
    advice = f"`ssh {host.host} true` must work without a question" if plan.transport == "ssh" else "check if it is up"
    return HostFault("no answer", (host.host,), "an answer of its agent", host.error, f"{advice}, or leave it out")


def _differences(checked: Sequence[HostChecks]) -> Iterator[HostFault]:
    """Yield a fault for each value that must be equal on all hosts. The most frequent value counts as right."""

    def of(name: str) -> Callable[[HostChecks], Any]:
        return lambda host: host.value(name)

    def minor(host: HostChecks) -> str:
        return ".".join(str(host.value("python") or "").split(".")[:2])

    same_python = "use the same Python on all hosts"
    yield from _unlike("python", checked, minor, same_python)
    # Only among hosts with the same minor version: the remaining hosts have their fault already.
    yield from _unlike("python", _majority(checked, minor), of("python"), same_python, is_fatal=False)
    for package in PACKAGES:
        yield from _unlike(package, checked, of(package), f"install the same {package} on all hosts")
    # Between versions sources always differ, and the version is a fault already.
    same_version = _majority(checked, of("lowtide"))
    update = "update it, so that all hosts run the same code"
    yield from _unlike("lowtide sources", same_version, of("lowtide_source"), update, is_fatal=False)
    yield from _unlike("script", checked, of("script"), "copy the same script to all hosts", is_fatal=False)
    yield from _unlike("accelerators", checked, _kind, "leave some hosts out with --include or --exclude")
    pace = "the slowest will set the pace"
    yield from _unlike("accelerators", _majority(checked, _kind), device_names, pace, is_fatal=False)


def _own_faults(plan: JobPlan, planned: HostPlan, host: HostChecks) -> Iterator[HostFault]:
    """Yield the faults of a single host."""
    yield from _missing_things(plan, planned, host)
    yield from _scarce_things(planned, host)
    yield from _way_to_master(plan, host)
    offset = host.clock_offset_seconds
    if offset is not None and abs(offset) > CLOCK_WARNING_SECONDS:
        side = "ahead" if offset > 0 else "behind"
        expected = f"a clock within {CLOCK_WARNING_SECONDS:g} s of the launcher's"
        is_fatal = abs(offset) > CLOCK_FAULT_SECONDS
        advice = "set it by NTP: `chronyc makestep`, or `timedatectl set-ntp true`"
        yield HostFault("clock", (host.host,), expected, f"it {abs(offset):.1f} s {side}", advice, is_fatal)


def _missing_things(plan: JobPlan, planned: HostPlan, host: HostChecks) -> Iterator[HostFault]:
    command = (
        " ".join(plan.command[1:3]) if plan.command[1:2] == ("-m",) else plan.command[1] if plan.command[1:] else ""
    )
    wanted = {
        "program": (f"the program {plan.command[0]}", "install it there, or name a path that all hosts have"),
        "folder": (f"the working folder {plan.folder}", "make it there: a shared file system, or a copy"),
        "script": (f"the script {command}", "copy it there, or name a path on a shared file system"),
        "module": (f"the module {command}", "install it there, or set PYTHONPATH with --env"),
    }
    for result in host.results:
        if result.name in wanted and result.error:
            expected, advice = wanted[result.name]
            yield HostFault(result.name, (host.host,), expected, result.error, advice)
        folder = result.name.removeprefix("write_folder ")
        if folder != result.name and result.error:
            advice = "make it there, or free it, and let this user write to it"
            yield HostFault("write folder", (host.host,), f"to write to the folder {folder}", result.error, advice)
    for package in PACKAGES:
        if host.value(package) == "":
            advice = "install it there, or start the same environment on all hosts"
            yield HostFault(package, (host.host,), f"{package} for {plan.command[0]}", "none", advice)
    needed = sum(rank.device is not None for rank in planned.ranks)
    count = _num_devices(host)
    if host.report is not None and needed > count:
        advice = "lower its slots, or look at `nvidia-smi` there"
        yield HostFault("accelerators", (host.host,), f"{_count(needed, 'accelerator')}", str(count), advice)


def _scarce_things(planned: HostPlan, host: HostChecks) -> Iterator[HostFault]:
    ranks = len(planned.ranks)
    free = host.value("free_memory_bytes")
    if free is not None and free < ranks * LOW_RANK_BYTES:
        advice = "end what takes it, or put fewer ranks there"
        expected = f"{size_text(ranks * LOW_RANK_BYTES)} of free memory for {_count(ranks, 'rank')}"
        yield HostFault("memory", (host.host,), expected, size_text(free), advice, free < ranks * LEAST_RANK_BYTES)
    shared = host.value("free_shared_memory_bytes")
    # It holds the shared memory of NCCL, of comm/shared_segment.py, and of workers of data loaders.
    if shared is not None and ranks > 1 and shared < LOW_SHARED_BYTES:
        advice = "in Docker add --shm-size=8g, in Kubernetes an emptyDir with medium Memory at /dev/shm"
        expected = f"{size_text(LOW_SHARED_BYTES)} free in /dev/shm for {_count(ranks, 'rank')}"
        yield HostFault("/dev/shm", (host.host,), expected, size_text(shared), advice, is_fatal=False)
    locked = host.value("locked_memory_bytes")
    # Registering buffers for RDMA locks them. Ranks on the CPU use gloo without RDMA.
    has_rdma = bool(host.value("rdma_devices")) and any(rank.device is not None for rank in planned.ranks)
    if has_rdma and isinstance(locked, int) and locked < LOW_LOCKED_BYTES:
        advice = "raise `ulimit -l` (LimitMEMLOCK=infinity of sshd or slurmd), or NCCL cannot use InfiniBand"
        expected = "no limit of locked memory"
        yield HostFault("locked memory", (host.host,), expected, size_text(locked), advice, is_fatal=False)


def _way_to_master(plan: JobPlan, host: HostChecks) -> Iterator[HostFault]:
    """Yield a fault if the host does not reach the ranks' store: by its name and its port on the first host."""
    master, address = plan.hosts[0].name, plan.master_address
    errors = {result.name: result.error for result in host.results}
    resolved = str(host.value("master_address") or "")
    # /etc/hosts of many distributions maps a host's name to 127.0.1.1. On that host alone this is no fault.
    is_loop = bool(resolved) and all(found.startswith("127.") or found == "::1" for found in resolved.split(", "))
    # Only the first cause: a host without the address cannot reach the port either.
    if errors.get("master_address"):
        advice = "add it to the name service or /etc/hosts, or name the hosts by addresses"
        yield HostFault("name", (host.host,), f"an address of {address}", errors["master_address"], advice)
    elif is_loop and host.host != master:
        advice = f"{address} must mean the host {master} everywhere: use another name, or change /etc/hosts"
        yield HostFault("name", (host.host,), f"an address of {address} on the network", resolved, advice)
    elif errors.get("master_port"):
        advice = f"open the ports between the hosts in the firewall, or use another address of {master}"
        expected = f"a way to the ranks' store at {address} on host {master}"
        yield HostFault("master", (host.host,), expected, errors["master_port"], advice)


def _unlike(
    subject: str,
    checked: Sequence[HostChecks],
    value_of: Callable[[HostChecks], Any],
    advice: str,
    is_fatal: bool = True,
) -> Iterator[HostFault]:
    """Yield a fault for each value but the most frequent. Ignores hosts without a value ("" or None)."""
    values = {host.host: value for host in checked if (value := value_of(host))}
    common = _most(values.values())
    alike = folded(host for host, value in values.items() if value == common)
    for other in dict.fromkeys(values.values()):
        if other != common:
            hosts = tuple(host for host, value in values.items() if value == other)
            yield HostFault(subject, hosts, f"{subject} {common} as on {alike}", str(other), advice, is_fatal)


def _majority(checked: Sequence[HostChecks], value_of: Callable[[HostChecks], Any]) -> list[HostChecks]:
    """Return the hosts with the most frequent value."""
    common = _most(value for host in checked if (value := value_of(host)))
    return [host for host in checked if value_of(host) == common]


def _folded(found: Iterable[HostFault]) -> list[HostFault]:
    """Merge faults that differ only in their hosts."""
    # A frozen dataclass without its hosts is the key, so equal faults of a thousand hosts become a line.
    hosts: dict[HostFault, tuple[str, ...]] = {}
    for fault in found:
        key = replace(fault, hosts=())
        hosts[key] = hosts.get(key, ()) + fault.hosts
    return [replace(key, hosts=names) for key, names in hosts.items()]


def _most(values: Iterable[Any]) -> Any:
    """Return the most frequent value, the first of several; None for no values."""
    return next((value for value, _ in Counter(values).most_common(1)), None)


def _kind(host: HostChecks) -> str:
    """Return "cuda", "hip" or "none"; "" without a report."""
    return host.report.kind if host.report is not None else ""


def _num_devices(host: HostChecks) -> int:
    # A device in MIG mode counts as its parts, as in the plan.
    return sum(max(1, len(device.parts)) for device in host.report.devices) if host.report is not None else 0


def device_names(host: HostChecks) -> str:
    """Return text like `2 x NVIDIA H100, 1 x NVIDIA A100`; "" without devices."""
    names = Counter(device.name for device in host.report.devices) if host.report is not None else Counter[str]()
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(nbytes: int) -> str:
    """Return text like `22.1 GiB`, `64 MiB`, `64 KiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.3g} {unit}"
    return f"{nbytes} bytes"
