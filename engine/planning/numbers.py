"""What this machine has been measured to reach: kept in a file of the user's, from which plans made here begin.

    {"cpu, 2 ranks a host": {"flops": 8.1e10, "memory": 7.4e9, ...}, "NVIDIA H100 80GB HBM3": {...}}

One entry for each kind of device, since a home folder may be that of many hosts. The numbers of processors depend on
how many ranks share them. An entry has fields of `Machine`; those that it lacks are the defaults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .machine import Machine

VARIABLE = "LOWTIDE_MACHINE"
_SPEEDS = ("flops", "memory", "intra", "inter", "intra_latency", "inter_latency", "host_memory", "link", "nvme")


def numbers_file() -> Path:
    """The file that LOWTIDE_MACHINE names, or else machine.json in the user's cache folder for lowtide."""
    named = os.environ.get(VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "lowtide" / "machine.json"


def device_key(device_name: str, ranks_per_host: int) -> str:
    """The entry of a device. device_name: "cpu", or as its driver calls it."""
    if device_name != "cpu":
        return device_name
    return f"cpu, {ranks_per_host} rank{'s' if ranks_per_host > 1 else ''} a host"


def read_numbers(path: Path) -> dict[str, dict[str, float]]:
    """By device; {} where there is no file. Raises ValueError for a file that is another one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: expected the numbers of machines as JSON, found what cannot be read ({error})"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ValueError(
            f'{path}: expected {{"device": {{"flops": ..., "memory": ...}}}}, found something else; delete it, or name '
            f"another file in {VARIABLE}"
        )
    for device, entry in found.items():
        for name, value in entry.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in _SPEEDS or not is_number or not value > 0:
                raise ValueError(
                    f'{path}: "{device}": expected positive numbers by the names {", ".join(_SPEEDS)}, found '
                    f'"{name}": {json.dumps(value)}'
                )
    return found


def with_numbers(machine: Machine, key: str, path: Path) -> Machine:
    """The machine with what was measured of this device, where something was. Raises ValueError as `read_numbers`."""
    numbers: dict[str, Any] = dict(read_numbers(path).get(key, {}))
    return replace(machine, **numbers)


def write_numbers(machine: Machine, key: str, path: Path) -> None:
    """Puts the speeds of a machine into the file, for this device. Raises OSError."""
    known: Mapping[str, Mapping[str, float]] = read_numbers(path)
    entry = {field.name: getattr(machine, field.name) for field in fields(machine) if field.name in _SPEEDS}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps({**known, key: entry}, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
