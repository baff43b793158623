"""Collect facts about this host before ranks start, without judging them. `preflight.faults` compares all hosts.

    1. the agent of rank 0's host:  held = HeldPort(port or None)        -> its port goes to the launcher
    2. every agent, in parallel:    run_checks(request with that port)   -> list of CheckResult
    3. the agent of rank 0's host:  held.release(), then ranks start

| name                        | value                                                             |
|-----------------------------|-------------------------------------------------------------------|
| `clock_start`, `clock_end`  | seconds since the epoch, before and after the checks              |
| `python`, `torch`, `lowtide`| installed versions; "" if missing                                 |
| `lowtide_source`            | eight hex digits of a hash of this package's files                |
| `free_memory_bytes`         | see `free_memory_bytes`                                           |
| `shared_memory_bytes`       | size of /dev/shm, and `free_shared_memory_bytes` of it            |
| `locked_memory_bytes`       | RLIMIT_MEMLOCK; "unlimited"                                       |
| `rdma_devices`              | number of InfiniBand and RoCE devices                             |
| `folder`, `program`         | their paths                                                       |
| `script`, `module`          | eight hex digits of the script's hash; the module's origin        |
| `write_folder PATH`         | its free bytes                                                    |
| `master_address`            | its addresses                                                     |
| `master_port`               | seconds until its `HeldPort` answered                             |
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .numa import control_groups
from .reach import UnreachableError, seconds_to_reach

PACKAGES = ("torch", "lowtide")
SHARED_MEMORY = Path("/dev/shm")
_RDMA = Path("/sys/class/infiniband")
_PROBE_BYTES = 4096
_DIGITS = 8

Value = str | int | float | None
Probe = Callable[[], Value]


_V1_LEVELS = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_LEVELS = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class CheckRequest:
    """The checks that a host must run.

    num_ranks: planned for the host. program: first word of the ranks' command. script: a file, relative to `folder`;
    module: the word after -m; not both. write_folders: the ranks' output folders. search_path: the ranks' PYTHONPATH.
    master_address, master_port: of rank 0's store, held by a `HeldPort` now; None: not tried. limit_seconds: for all
    checks together.
    """

    num_ranks: int
    folder: str
    program: str
    script: str | None = None
    module: str | None = None
    write_folders: tuple[str, ...] = ()
    search_path: tuple[str, ...] = ()
    master_address: str = ""
    master_port: int | None = None
    limit_seconds: float = 5.0


@dataclass(frozen=True)
class CheckResult:
    """A fact. value: None if the check failed; then `error` is the system's text. Names contain units."""

    name: str
    value: Value
    error: str = ""


def run_checks(request: CheckRequest) -> list[CheckResult]:
    """Run all checks in parallel. Takes milliseconds; up to `limit_seconds` if a file system or the network is silent.

    An agent calls it in a thread, so that its heartbeat continues.
    """
    start = time.time()
    deadline = time.monotonic() + request.limit_seconds
    probes = _probes(request)
    answers: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()
    for name, probe in probes.items():
        # A thread each, abandoned if need be: a dead network file system blocks its callers for ever.
        threading.Thread(target=_answer, args=(answers, name, probe), daemon=True).start()
    silent = f"no answer within {request.limit_seconds:g} s"
    # Filled before: a probe that never answers keeps this text.
    found = {name: CheckResult(name, None, silent) for name in probes}
    for _ in probes:
        try:
            # A single deadline for all: the probes run side by side.
            result = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[result.name] = result
    return [CheckResult("clock_start", start), *found.values(), CheckResult("clock_end", time.time())]


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _version(package: str) -> str:
    import importlib.metadata  # late: it takes 14 ms, and only checked hosts need it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _answer(answers: "queue.SimpleQueue[CheckResult]", name: str, probe: Probe) -> None:
    answers.put(_outcome(name, probe))


def _outcome(name: str, probe: Probe) -> CheckResult:
    try:
        return CheckResult(name, probe())
    except UnreachableError as error:
        return CheckResult(name, None, str(error))
    except OSError as error:
        return CheckResult(name, None, error.strerror or str(error))
    except Exception as error:  # a failing check must not hide the remaining results
        return CheckResult(name, None, f"{type(error).__name__}: {error}")


def _probes(request: CheckRequest) -> dict[str, Probe]:
    """Return every check of the request by name."""
    folder = Path(request.folder)
    probes: dict[str, Probe] = {
        "python": _python,
        **{package: partial(_version, package) for package in PACKAGES},
        "lowtide_source": source_digest,
        "free_memory_bytes": free_memory_bytes,
        "shared_memory_bytes": lambda: _file_system_bytes(SHARED_MEMORY)[0],
        "free_shared_memory_bytes": lambda: _file_system_bytes(SHARED_MEMORY)[1],
        "locked_memory_bytes": _locked_memory,
        "rdma_devices": lambda: sum(1 for _ in _RDMA.iterdir()) if _RDMA.is_dir() else 0,
        "folder": lambda: _readable_folder(folder),
        "program": lambda: _program(request.program),
    }
    if request.script is not None:
        script = folder / request.script
        probes["script"] = lambda: _script_digest(script)
    if request.module is not None:
        module = request.module
        probes["module"] = lambda: _module_origin(module, [request.folder, *request.search_path])
    for name in request.write_folders:
        # `partial` binds this folder. A lambda would see the last folder of the loop.
        probes[f"write_folder {name}"] = partial(_free_after_writing, folder / name)
    if request.master_address:
        probes["master_address"] = lambda: _resolved(request.master_address)
    if request.master_port is not None:
        address, port, limit = request.master_address, request.master_port, request.limit_seconds
        probes["master_port"] = lambda: seconds_to_reach(address, port, limit)
    return probes


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes available without swapping and within this process's control groups. root: of /sys and /proc.

    Inactive page cache counts as free.
    """
    import psutil  # late: it takes a tenth of a launcher's start, unneeded there

    left: int = psutil.virtual_memory().available
    for folder, is_first_version in control_groups(root, "memory"):
        limit_name, usage_name, cache_name = _V1_LEVELS if is_first_version else _V2_LEVELS
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:  # the root group has no limit and no files
            continue
        if limit != "max":
            cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache_name} ")), 0)
            # A parent group may have the lower limit. Without a limit, version 1 writes a number near 2^63.
            left = min(left, int(limit) - usage + cache)
    return max(left, 0)


def source_digest(root: Path = Path(__file__).parents[2]) -> str:
    """Return eight hex digits of a hash of this package's sources. root: the folder of its subpackages."""
    digest = hashlib.sha256()
    # A checkout has more folders beside the package's; lowtide/ has what site-packages has in the root.
    folders = [
        path.parent for path in sorted(root.glob("*/__init__.py")) if path.parent.name not in ("tests", "lowtide")
    ]
    for folder in folders:
        # Sorted: file systems list equal folders in different orders.
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cpp")]):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]


def _file_system_bytes(path: Path) -> tuple[int, int]:
    """Return (size, bytes that this user can still write)."""
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _locked_memory() -> int | str:
    if sys.platform == "win32":
        return "unlimited"
    import resource  # POSIX only

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _readable_folder(path: Path) -> str:
    with os.scandir(path):
        return str(path)


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError("no such program")
    return path


def _script_digest(path: Path) -> str:
    # Python runs a folder with a __main__.py. Its files are not compared.
    if path.is_dir():
        return "folder"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]


def _module_origin(name: str, folders: list[str]) -> str:
    top = name.partition(".")[0]
    # Only the top: to find `a.b`, Python imports `a`, and a check must not run the user's code.
    spec = importlib.machinery.PathFinder.find_spec(top, folders) or importlib.util.find_spec(top)
    if spec is None:
        raise FileNotFoundError("no such module")
    return spec.origin or top


def _free_after_writing(path: Path) -> int:
    """Return the free bytes of a folder after writing a small file to it, or to its parent if it does not exist."""
    place = path if path.exists() else path.parent
    # Unbuffered and with bytes: a full disk or a quota shows in the write, not in the opening.
    with tempfile.TemporaryFile(dir=place, prefix="lowtide-check-", buffering=0) as file:
        file.write(bytes(_PROBE_BYTES))
    return _file_system_bytes(place)[1]


def _resolved(address: str) -> str:
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
