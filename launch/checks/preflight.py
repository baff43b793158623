"""Before anything starts: are all hosts there, alike, and fit for what the plan puts on them?

How the launcher uses it, with agents as `checks` says:

    requests = [request_for(plan, host, folders, master_port) for host in plan.hosts]     one Check message each
    checked = [HostChecks(host.name, results, report, clock_offset(results, sent, received)), ...]
              HostChecks(host.name, error="Connection refused")                           for one that does not answer
    found = faults(plan, checked)
    print(table(checked, found)) and each of `found`; start only if none of them is_fatal
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..hosts.plan import HostPlan, JobPlan
from .facts import CheckRequest, CheckResult
from .faults import HostChecks, HostFault, device_names, faults, size_text

__all__ = ["HostChecks", "HostFault", "clock_offset", "faults", "folders_of_config", "request_for", "table"]

_CONFIG_BYTES = 1 << 20  # a larger JSON file among the arguments is data


def request_for(
    plan: JobPlan, host: HostPlan, folders: Sequence[str] = (), master_port: int | None = None
) -> CheckRequest:
    """What `host` is to look at. folders: `--check-folder` and `folders_of_config`; master_port: of the HeldPort."""
    program, *rest = plan.command
    is_module = rest[:1] == ["-m"]
    environment = {**plan.environment, **(host.ranks[0].environment if host.ranks else {})}
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
    """The nvme_path of every section with "device": "nvme" in the JSON files among a script's arguments.

    arguments: `train.json`, `--config=train.json`. folder: where relative names of the files start. A file that is not
    there, is no JSON, or is larger than 1 MiB has none.
    """
    found: dict[str, None] = {}
    for argument in arguments:
        path = folder / argument.rpartition("=")[2]
        if path.suffix != ".json":
            continue
        try:
            if path.stat().st_size > _CONFIG_BYTES:
                continue
            config = json.loads(path.read_text(encoding="utf-8"))
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
        if isinstance(path, str) and node.get("device") == "nvme":
            yield path
        for item in node.values():
            yield from _nvme_paths(item)


def clock_offset(results: Sequence[CheckResult], sent: float, received: float) -> float | None:
    """The host's clock minus the launcher's, in seconds; sent, received: time.time() at the launcher around the checks.

    Exact to half of what the messages took; None without the clock among `results`. Source: RFC 5905 (NTP), section 8.
    """
    clocks = {result.name: result.value for result in results}
    start, end = clocks.get("clock_start"), clocks.get("clock_end")
    if not isinstance(start, int | float) or not isinstance(end, int | float):
        return None
    return ((start - sent) + (end - received)) / 2


def table(checked: Sequence[HostChecks], found: Sequence[HostFault] = ()) -> str:
    """One row a host: versions, devices, memory, clock, and what of `found` concerns it ("ok", or the subjects)."""
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
