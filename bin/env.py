"""`lowtide env`: what this machine has, what works on it, and why the rest does not."""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from ..engine.plan.measured import VARIABLE, Measured, default_path
from ..engine.plan.measuring.measure import MeasuringError, measure
from ..kernels.cpu_build import BuildError, find_compiler
from ..kernels.dispatch import has_triton
from ..kernels.optimizer_step import cpu_kernel
from ..launch.checks.facts import CheckRequest, CheckResult, run_checks, versions
from ..launch.checks.faults import size_text
from ..launch.hosts.host import HostReport
from ..launch.hosts.report import report_host
from ..offload import PagePool
from .arguments import Parser

HELP = "say what this machine has, what works on it, and why the rest does not"
_EPILOG = """examples:
  lowtide env
  lowtide env --folder /nvme            also whether the offload can be to that folder
  lowtide env --json > report.json      for a bug report
  lowtide env --measure                 what a plan of this machine needs to know, into a file that plans read

Nothing is printed by which the machine, its user or its secrets could be known: no host names, addresses or values of
the environment but those listed; the home folder is shown as ~.
"""
# Variables that change what training does here, and whose values are no secret.
_VARIABLES = (
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
    ),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "LOWTIDE_CPU_KERNEL", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)

Section = dict[str, str | int | float]


class Ability(NamedTuple):
    """Something that works here or not. why: what it was known by, or what is missing and what to do."""

    works: bool
    why: str


def main(argv: Sequence[str]) -> int:
    """Prints the report; 1 where `--folder` cannot be written to."""
    options = parser().parse_args(argv)
    if options.measure is not None:
        return _measure(options.measure, options.folder)
    report = report_host()
    checks = _checks(options.folder)
    facts = {name: result.value for name, result in checks.items()}
    abilities = _abilities(report, facts)
    if options.folder is not None:
        abilities["offload to nvme"] = _writing(checks, options.folder)
    sections: dict[str, Section] = {
        "versions": _versions(facts),
        "devices": _devices(report),
        "machine": _machine(report, facts),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    text = _as_json(sections, abilities) if options.json else _as_text(sections, abilities)
    print(_without_home(text, str(Path.home())))
    return 1 if options.folder is not None and not abilities["offload to nvme"].works else 0


def parser() -> Parser:
    """The command line of `lowtide env`."""
    result = Parser(
        prog="lowtide env",
        description=HELP[0].upper() + HELP[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--folder", type=Path, metavar="DIR", help="say whether files can be in this folder too")
    result.removed = {"--quick": "nothing is measured without --measure, so leave it out"}
    result.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        nargs="?",
        const=default_path(),
        help="measure with 1, 2 and 4 ranks on the processors, in a few minutes, and write FILE for plans to read "
        f"(default: ${VARIABLE}, or machine.json in the cache folder); with --folder, the offload to files there too",
    )
    result.add_argument("--json", action="store_true", help="as JSON, with numbers in bytes")
    return result


def _measure(path: Path, folder: Path | None) -> int:
    """Writes the file; 1 where something could not be measured."""
    try:
        before = Measured.read(path).factors if path.exists() else {}
        found = measure(lambda text: print(text, flush=True), folder)
        factors = {key: one for key, one in before.items() if not key.startswith("cpu")}  # of what was measured before
        replace(found, factors=factors).write(path)
    except (MeasuringError, OSError, ValueError) as error:
        print(f"lowtide env: {error}", file=sys.stderr)
        return 1
    print(f"written to {path}")
    return 0


def _checks(folder: Path | None) -> dict[str, CheckResult]:
    request = CheckRequest(1, str(Path.cwd()), sys.executable, write_folders=() if folder is None else (str(folder),))
    return {result.name: result for result in run_checks(request)}


def _versions(facts: Mapping[str, object]) -> Section:
    found: Section = {**versions(), "sources": str(facts.get("lowtide_source", ""))}
    found["triton"] = _version_of("triton")
    found["numpy"] = _version_of("numpy")
    found["pydantic"] = _version_of("pydantic")
    found["cuda"] = torch.version.cuda or "torch is built without it"
    found["os"] = _os_name()
    found["kernel"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def _devices(report: HostReport) -> Section:
    found: Section = {}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for index in range(torch.accelerator.device_count() if accelerator is not None else 0):
        assert accelerator is not None
        found[f"{accelerator.type}:{index}"] = _properties(accelerator, index)
    if not found:
        found = {f"device {device.identities[0]}": device.name for device in report.devices}
    return found or {"accelerators": "none"}


def _properties(accelerator: torch.device, index: int) -> str:
    """What torch's module of the accelerator says of a device; not all of them say as much as CUDA's."""
    ask = getattr(torch.get_device_module(accelerator), "get_device_properties", None)
    device: Any = ask(index) if ask is not None else None
    found = [str(getattr(device, "name", accelerator.type))]
    if hasattr(device, "total_memory"):
        found.append(size_text(device.total_memory))
    if hasattr(device, "major") and hasattr(device, "minor"):
        found.append(f"compute capability {device.major}.{device.minor}")
    return ", ".join(found)


def _machine(report: HostReport, facts: Mapping[str, object]) -> Section:
    names = ("free_memory_bytes", "shared_memory_bytes", "free_shared_memory_bytes", "locked_memory_bytes")
    found: Section = {"processor": _processor(), "cores": os.cpu_count() or 1, "usable cores": report.num_cores}
    found["threads of torch"] = torch.get_num_threads()
    found["numa nodes"] = max(1, len(report.nodes))
    found["memory_bytes"] = psutil.virtual_memory().total
    found |= {name: value for name in names if isinstance(value := facts.get(name), str | int | float)}
    found["rdma devices"] = int(str(facts.get("rdma_devices") or 0))
    return found


def _abilities(report: HostReport, facts: Mapping[str, object]) -> dict[str, Ability]:
    shared = facts.get("free_shared_memory_bytes")
    room = isinstance(shared, int) and shared > 0 and os.access("/dev/shm", os.W_OK)
    pages = PagePool.is_possible()
    return {
        "cuda": _cuda(report),
        "nccl": _nccl(),
        "triton kernels": _triton(),
        "c++ compiler": _compiler(),
        "cpu update kernel": _cpu_kernel(),
        "shared-memory route": Ability(
            room, f"{size_text(int(str(shared)))} free in /dev/shm" if room else "/dev/shm has no room, or is read-only"
        ),
        "parameters on nvme": Ability(
            pages, "pages can be moved" if pages else f"needs Linux 5.7 or newer, found {platform.release()}"
        ),
        "ssh": _ssh(),
    }


def _cuda(report: HostReport) -> Ability:
    if torch.cuda.is_available():
        return Ability(True, f"{torch.cuda.device_count()} devices that torch can use")
    if torch.version.cuda is None and torch.version.hip is None:
        there = f", though there are {len(report.devices)} accelerators: install another" if report.devices else ""
        return Ability(False, f"torch {torch.__version__} is built without CUDA{there}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Ability(False, "CUDA_VISIBLE_DEVICES is empty, which hides all devices")
    return Ability(False, "torch finds no device" + ("; is the driver new enough?" if report.devices else ""))


def _nccl() -> Ability:
    if not torch.cuda.is_available():
        return Ability(False, "it needs CUDA devices; ranks on processors use gloo and shared memory")
    try:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError) as error:
        return Ability(False, f"torch is built without it ({error})")
    return Ability(True, "version " + ".".join(map(str, version)))


def _triton() -> Ability:
    if not has_triton():
        return Ability(False, "triton is not installed; eager torch operations do the same, slower on a GPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Ability(True, "in the interpreter (TRITON_INTERPRET=1), for tests: slow")
    if not torch.cuda.is_available():
        return Ability(False, "there is no GPU; eager torch operations do the same")
    return Ability(True, f"triton {_version_of('triton')}")


def _compiler() -> Ability:
    try:
        command = find_compiler()
    except BuildError as error:
        return Ability(False, str(error))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
        return Ability(True, f"{command[0]}: {(done.stdout.splitlines() or ['it does not say its version'])[0]}")
    return Ability(False, f"{command[0]} cannot be run")


def _cpu_kernel() -> Ability:
    """Builds it, as training would; its log says which form it is, and why."""
    with _logged() as lines:
        try:
            kernel = cpu_kernel()
        except ValueError as error:
            return Ability(False, str(error))
    said = lines[-1].removeprefix("CPU optimizer: ") if lines else "built before"
    return Ability(kernel is not None, said)


def _ssh() -> Ability:
    path = shutil.which("ssh")
    if path is None:
        return Ability(False, "there is no `ssh` in the path; install OpenSSH's client to start jobs on other hosts")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([path, "-V"], capture_output=True, text=True, errors="replace", timeout=10)
        return Ability(True, (done.stderr or done.stdout).strip())
    return Ability(False, f"{path} cannot be run")


def _writing(checks: Mapping[str, CheckResult], folder: Path) -> Ability:
    """Whether files can be in the folder."""
    found = checks[f"write_folder {folder}"]
    if found.value is None:
        return Ability(False, f"{folder}: {found.error}: name a folder that exists and can be written to")
    return Ability(True, f"{folder}: can be written to, {size_text(int(found.value))} free")


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What the library's log says meanwhile; it is shown nowhere else."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lowtide"), Keep()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _without_home(text: str, home: str) -> str:
    """`text` with ~ for the home folder; that of a user of a container is often `/`, which tells nothing."""
    return text if home == "/" else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def _as_json(sections: Mapping[str, Section], abilities: Mapping[str, Ability]) -> str:
    works = {name: {"works": ability.works, "why": ability.why} for name, ability in abilities.items()}
    return json.dumps({**sections, "works": works}, indent=2)


def _as_text(sections: Mapping[str, Section], abilities: Mapping[str, Ability]) -> str:
    blocks: dict[str, dict[str, str]] = {
        name: {_label(name, key): _shown(key, value) for key, value in section.items()}
        for name, section in sections.items()
        if section
    }
    blocks["works"] = {name: f"{'yes' if able else 'no ':<3}  {why}" for name, (able, why) in abilities.items()}
    width = max(len(key) for block in blocks.values() for key in block)
    lines = []
    for name, block in blocks.items():
        lines += [name, *(f"  {key:<{width}}  {value}" for key, value in block.items()), ""]
    return "\n".join(lines[:-1])


def _label(section: str, key: str) -> str:
    return key if section == "environment" else key.removesuffix("_bytes").replace("_", " ")


def _shown(key: str, value: str | int | float) -> str:
    return size_text(value) if key.endswith("_bytes") and isinstance(value, int) else str(value)
