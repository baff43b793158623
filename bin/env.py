"""`lowtide env`: what this machine has, what works on it, and why the rest does not."""

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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils import collect_env

from ..engine.plan.measured import VARIABLE, Measured, default_path
from ..engine.plan.measuring.measure import MeasuringError, measure
from ..kernels.cpu_build import BuildError, find_compiler
from ..kernels.dispatch import has_triton
from ..kernels.optimizer_step import cpu_kernel
from ..launch.hosts.facts import CheckRequest, run_checks, versions
from ..launch.hosts.host import HostReport
from ..launch.hosts.preflight import size_text
from ..launch.hosts.report import report_host
from ..offload import PagePool
from .arguments import Parser

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

_MACHINE = ("free_memory_bytes", "shared_memory_bytes", "free_shared_memory_bytes", "locked_memory_bytes")

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
    folders = () if options.folder is None else (str(options.folder),)
    checks = run_checks(CheckRequest(1, str(Path.cwd()), sys.executable, write_folders=folders))
    facts = {result.name: result.value for result in checks}
    abilities = _abilities(report_host(), facts)
    if options.folder is not None:
        error = next(result.error for result in checks if result.name == f"write_folder {options.folder}")
        abilities["offload to nvme"] = _writing(options.folder, facts[f"write_folder {options.folder}"], error)
    sections = _sections(facts)
    text = _as_json(sections, abilities) if options.json else _as_text(sections, abilities)
    print(_without_home(text, str(Path.home())))
    return 1 if options.folder is not None and not abilities["offload to nvme"].works else 0


def parser() -> Parser:
    """The command line of `lowtide env`."""
    result = Parser.of("env", _EPILOG)
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


def _sections(facts: Mapping[str, Any]) -> dict[str, Section]:
    """What torch's own bug reports have, and what a training of ours needs beside it."""
    collected = collect_env.get_env_info()._asdict()  # type: ignore[no-untyped-call]
    lines = [line.partition(":") for line in (collected.pop("cpu_info") or "").splitlines()]
    del collected["python_version"], collected["torch_version"], collected["pip_packages"], collected["conda_packages"]
    return {
        "versions": {
            **versions(),
            "sources": str(facts.get("lowtide_source", "")),
            **{name: _version_of(name) for name in ("triton", "numpy", "pydantic")},
        },
        "torch": {
            name: str(value).replace("\n", "; ") for name, value in collected.items() if value not in (None, "N/A", {})
        },
        "machine": {
            "processor": next((value.strip() for key, _, value in lines if key == "Model name"), platform.machine()),
            "cores": os.cpu_count() or 1,
            "threads of torch": torch.get_num_threads(),
            "accelerator": str(torch.accelerator.current_accelerator() or "none"),
            "memory_bytes": psutil.virtual_memory().total,
            **{name: facts[name] for name in _MACHINE if facts.get(name) is not None},
            "rdma devices": facts.get("rdma_devices") or 0,
        },
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _abilities(report: HostReport, facts: Mapping[str, Any]) -> dict[str, Ability]:
    shared: int = facts.get("free_shared_memory_bytes") or 0
    room = shared > 0 and os.access("/dev/shm", os.W_OK)
    pages = PagePool.is_possible()
    return {
        "cuda": _cuda(report),
        "nccl": _nccl(),
        "triton kernels": _triton(),
        "c++ compiler": _compiler(),
        "cpu update kernel": _cpu_kernel(),
        "shared-memory route": Ability(
            room, f"{size_text(shared)} free in /dev/shm" if room else "/dev/shm has no room, or is read-only"
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
        return _said([*find_compiler(), "--version"])
    except BuildError as error:
        return Ability(False, str(error))


def _ssh() -> Ability:
    if shutil.which("ssh") is None:
        return Ability(False, "there is no `ssh` in the path; install OpenSSH's client to start jobs on other hosts")
    return _said(["ssh", "-V"])


def _said(command: Sequence[str]) -> Ability:
    """That of a program, by the first line that it says of its version."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
        lines = (done.stdout or done.stderr).splitlines()
        return Ability(True, f"{command[0]}: {lines[0] if lines else 'it does not say its version'}")
    return Ability(False, f"{command[0]} cannot be run")


def _cpu_kernel() -> Ability:
    """Builds it, as training would; its log says which form it is, and why."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lowtide")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # it is shown nowhere else
    try:
        kernel = cpu_kernel()
    except ValueError as error:
        return Ability(False, str(error))
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
    return Ability(kernel is not None, lines[-1].removeprefix("CPU optimizer: ") if lines else "built before")


def _writing(folder: Path, free_bytes: Any, error: str) -> Ability:
    """Whether files can be in the folder."""
    if free_bytes is None:
        return Ability(False, f"{folder}: {error}: name a folder that exists and can be written to")
    return Ability(True, f"{folder}: can be written to, {size_text(free_bytes)} free")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _without_home(text: str, home: str) -> str:
    """`text` with ~ for the home folder; that of a user of a container is often `/`, which tells nothing."""
    return text if home == "/" else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def _as_json(sections: Mapping[str, Section], abilities: Mapping[str, Ability]) -> str:
    works = {name: {"works": ability.works, "why": ability.why} for name, ability in abilities.items()}
    return json.dumps({**sections, "works": works}, indent=2)


def _as_text(sections: Mapping[str, Section], abilities: Mapping[str, Ability]) -> str:
    blocks: dict[str, dict[str, str]] = {
        name: {key.removesuffix("_bytes"): _shown(key, value) for key, value in section.items()}
        for name, section in sections.items()
        if section
    }
    blocks["works"] = {name: f"{'yes' if able else 'no ':<3}  {why}" for name, (able, why) in abilities.items()}
    width = max(len(key) for block in blocks.values() for key in block)
    lines = []
    for name, block in blocks.items():
        lines += [name, *(f"  {key:<{width}}  {value}" for key, value in block.items()), ""]
    return "\n".join(lines[:-1])


def _shown(key: str, value: str | int | float) -> str:
    return size_text(value) if key.endswith("_bytes") and isinstance(value, int) else str(value)
