"""`lowtide env`: report this machine's hardware and software, and which features work on it.

`torch.utils.collect_env` gives most facts; `_sections` adds facts that lowtide needs. `_works` lists the features.
"""

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import collect_env

from ..engine.plan.measured import VARIABLE, Measured, default_path
from ..engine.plan.measuring.measure import MeasuringError, measure
from ..kernels.cpu_build import BuildError, find_compiler
from ..kernels.dispatch import has_triton
from ..kernels.optimizer_step import cpu_kernel
from ..launch.hosts.facts import CheckRequest, run_checks
from ..launch.hosts.host import HostReport
from ..launch.hosts.preflight import size_text
from ..launch.hosts.report import report_host
from ..offload import PagePool
from .arguments import Parser, reports

_EPILOG = """examples:
  lowtide env
  lowtide env --folder /nvme            also test if files can be offloaded to this folder
  lowtide env --json > report.json      for a bug report
  lowtide env --measure                 measure this machine for `lowtide plan --machine`

The report contains no host names and no addresses. It shows the home folder as ~, and only environment variables that
hold no secrets.
"""
# Variables that change a training and whose values are no secret.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "LOWTIDE_CPU_KERNEL", "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
_MEMORY = ("free_memory_bytes", "shared_memory_bytes", "free_shared_memory_bytes", "locked_memory_bytes")
_IN_VERSIONS = ("python_version", "torch_version", "pip_packages", "conda_packages")

Section = dict[str, str | int | float]
Answer = tuple[bool, str]
"""True if a feature works, and the reason why it does or does not."""


def main(argv: Sequence[str]) -> int:
    """Print the report. Return 1 if `--folder` is not writable, or if measuring failed."""
    options = parser().parse_args(argv)
    if options.measure is not None:
        return _measure(options.measure, options.folder)
    folders = () if options.folder is None else (str(options.folder),)
    checks = run_checks(CheckRequest(1, str(Path.cwd()), sys.executable, write_folders=folders))
    facts = {result.name: result.value for result in checks}
    works = _works(report_host(), facts)
    for result in checks:
        if result.name.startswith("write_folder"):
            why = f"{options.folder}: {result.error}; name an existing folder with write permission"
            if result.value is not None:
                why = f"{options.folder}: writable, {size_text(int(result.value))} free"
            works["offload to nvme"] = result.value is not None, why
    text = (_as_json if options.json else _as_text)(_sections(facts), works)
    home = str(Path.home())  # "/" for users of many containers: then nothing is replaced
    print(text if home == "/" else re.sub(re.escape(home) + r"(?![\w.-])", "~", text))
    return 0 if works.get("offload to nvme", (True, ""))[0] else 1


def parser() -> Parser:
    """Return the command line of `lowtide env`."""
    result = Parser.of("env", _EPILOG)
    result.add_argument("--folder", type=Path, metavar="DIR", help="test if files can be offloaded to this folder")
    result.removed = {"--quick": "nothing is measured without --measure, so leave it out"}
    result.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        nargs="?",
        const=default_path(),
        help="measure CPU training with 1, 2 and 4 ranks, which takes a few minutes, and write FILE for "
        f"`lowtide plan --machine` (default: ${VARIABLE}, or machine.json in the cache folder); --folder adds the "
        "offload to files",
    )
    result.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    return result


@reports("env", MeasuringError, OSError, ValueError)
def _measure(path: Path, folder: Path | None) -> int:
    before = Measured.read(path).factors if path.exists() else {}
    found = measure(lambda text: print(text, flush=True), folder)
    # Factors of GPUs stay valid. Those of the CPU corrected the numbers that were just replaced.
    factors = {key: factor for key, factor in before.items() if not key.startswith("cpu")}
    replace(found, factors=factors).write(path)
    print(f"written to {path}")
    return 0


def _sections(facts: Mapping[str, Any]) -> dict[str, Section]:
    collected = collect_env.get_env_info()._asdict()  # type: ignore[no-untyped-call]
    processor = re.search(r"Model name: *(.*)", collected.pop("cpu_info") or "")
    versions = {name: facts[name] for name in ("python", "torch", "lowtide")}
    return {
        "versions": {**versions, "sources": str(facts["lowtide_source"] or ""), **_installed()},
        "torch": {
            name: str(value).replace("\n", "; ")
            for name, value in collected.items()
            if name not in _IN_VERSIONS and value not in (None, "N/A", {})
        },
        "machine": {
            "processor": processor[1] if processor else platform.machine(),
            "cores": os.cpu_count() or 1,
            "threads of torch": torch.get_num_threads(),
            "accelerator": str(torch.accelerator.current_accelerator() or "none"),
            "memory_bytes": psutil.virtual_memory().total,
            **{name: facts[name] for name in _MEMORY if facts.get(name) is not None},
            "rdma devices": facts.get("rdma_devices") or 0,
        },
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _installed() -> dict[str, str]:
    installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    return {name: installed.get(name, "not installed") for name in ("triton", "numpy", "pydantic")}


def _works(report: HostReport, facts: Mapping[str, Any]) -> dict[str, Answer]:
    shared: int = facts.get("free_shared_memory_bytes") or 0
    has_room, pages, ssh = shared > 0 and os.access("/dev/shm", os.W_OK), PagePool.is_possible(), shutil.which("ssh")
    old_linux = f"needs Linux 5.7 or newer, found {platform.release()}"
    no_ssh = "no `ssh` in the path; install OpenSSH's client to start jobs on other hosts"
    return {
        "cuda": _cuda(report),
        "nccl": _nccl(),
        "triton kernels": _triton(),
        "c++ compiler": _compiler(),
        "cpu update kernel": _cpu_kernel(),
        "shared-memory transport": (
            has_room,
            f"{size_text(shared)} free in /dev/shm" if has_room else "/dev/shm is full or read-only",
        ),
        "parameters on nvme": (pages, "the kernel can move pages" if pages else old_linux),
        "ssh": (ssh is not None, ssh or no_ssh),
    }


def _cuda(report: HostReport) -> Answer:
    if torch.cuda.is_available():
        return True, f"torch finds {torch.cuda.device_count()} devices"
    if torch.version.cuda is None and torch.version.hip is None:
        hint = f", but this host has {len(report.devices)} accelerators; install a GPU build" if report.devices else ""
        return False, f"torch {torch.__version__} is built without CUDA{hint}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False, "CUDA_VISIBLE_DEVICES is empty, which hides all devices"
    return False, "torch finds no device" + ("; check the version of the driver" if report.devices else "")


def _nccl() -> Answer:
    if not torch.cuda.is_available():
        return False, "needs CUDA devices; CPU ranks use gloo and shared memory"
    try:
        return True, "version " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError) as error:
        return False, f"torch is built without NCCL ({error})"


def _triton() -> Answer:
    if not has_triton():
        return False, "triton is not installed; eager torch operations replace it, slower on a GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "in the interpreter (TRITON_INTERPRET=1): slow, for tests"
    if not torch.cuda.is_available():
        return False, "needs a GPU; eager torch operations replace it"
    return True, f"triton {_installed()['triton']}"


def _compiler() -> Answer:
    try:
        return True, " ".join(find_compiler())  # its version is among the facts of torch
    except BuildError as error:
        return False, str(error)


def _cpu_kernel() -> Answer:
    """Build the C++ update kernel as a training does. The reason is the line that the build logs."""
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False  # the report shows the line, so the log does not

    logger = logging.getLogger("lowtide")
    level = logger.level
    logger.addFilter(keep)
    logger.setLevel(logging.INFO)
    try:
        kernel = cpu_kernel()
    except ValueError as error:
        return False, str(error)
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)
    return kernel is not None, lines[-1].removeprefix("CPU optimizer: ") if lines else "built before"


def _as_json(sections: Mapping[str, Section], works: Mapping[str, Answer]) -> str:
    answers = {name: {"works": does, "why": why} for name, (does, why) in works.items()}
    return json.dumps({**sections, "works": answers}, indent=2)


def _as_text(sections: Mapping[str, Section], works: Mapping[str, Answer]) -> str:
    blocks = {name: dict(map(_with_unit, section.items())) for name, section in sections.items() if section}
    blocks["works"] = {name: f"{'yes' if does else 'no ':<3}  {why}" for name, (does, why) in works.items()}
    width = max(len(key) for block in blocks.values() for key in block)
    return "\n\n".join(
        "\n".join([name, *(f"  {key:<{width}}  {value}" for key, value in block.items())])
        for name, block in blocks.items()
    )


def _with_unit(entry: tuple[str, str | int | float]) -> tuple[str, str]:
    key, value = entry
    is_size = key.endswith("_bytes") and isinstance(value, int)
    return key.removesuffix("_bytes"), size_text(int(value)) if is_size else str(value)
