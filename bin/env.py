"""`lowtide env`: report this machine's hardware and software, and which features work on it.

`torch.utils.collect_env` gives most facts; `_sections` adds facts that lowtide needs. `_works` asks each feature.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import collect_env

from ..engine.plan.measured import VARIABLE, Factors, Measured, default_path
from ..engine.plan.measuring.measure import measure
from ..kernels.cpu_build import BuildError, find_compiler, make_or_say_why
from ..kernels.dispatch import has_triton, why_not_started
from ..kernels.optimizer_step import CPU_FORMS, CpuKernel
from ..launch.hosts.facts import CheckRequest, run_checks
from ..launch.hosts.preflight import size_text
from ..launch.hosts.report import report_host
from ..offload import PagePool
from .arguments import Parser, output_file, reports

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
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "LOWTIDE_CPU_KERNEL", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)  # fmt: skip
_MEMORY = ("free_memory_bytes", "shared_memory_bytes", "free_shared_memory_bytes", "locked_memory_bytes")
_IN_VERSIONS = ("python_version", "torch_version", "pip_packages", "conda_packages")
_OFFLOAD = "offload to nvme"


def main(argv: Sequence[str]) -> int:
    """Print the report. Return 1 if `--folder` is not writable, or if measuring failed."""
    options = parser().parse_args(argv)
    if options.measure is not None:
        if options.json:
            parser().error("--json: expected none with --measure, which writes its file and prints no report")
        if options.folder is not None and not os.access(options.folder, os.W_OK | os.X_OK):
            parser().error(f"--folder: expected an existing folder that you may write, found {options.folder}")
        return _measure(options.measure, options.folder)
    folders = () if options.folder is None else (str(options.folder),)
    checks = run_checks(CheckRequest(1, str(Path.cwd()), sys.executable, write_folders=folders))
    facts = {result.name: result.value for result in checks}
    works = _works(facts)
    for result in checks:
        if result.name.startswith("write_folder"):
            why = f"{result.error}; name an existing folder with write permission"
            if result.value is not None:
                why = f"writable, {size_text(int(result.value))} free"
            works[_OFFLOAD] = {"works": result.value is not None, "why": f"{options.folder}: {why}"}
    report = {**_sections(facts), "works": works}
    text = json.dumps(report, indent=2) if options.json else _as_text(report)
    home = str(Path.home())  # "/" for users of many containers: then nothing is replaced
    print(text if home == "/" else re.sub(re.escape(home) + r"(?![\w.-])", "~", text))
    return 0 if _OFFLOAD not in works or works[_OFFLOAD]["works"] else 1


def parser() -> Parser:
    """Return the command line of `lowtide env`."""
    result = Parser.of("env", _EPILOG)
    result.add_argument("--folder", type=Path, metavar="DIR", help="test if files can be offloaded to this folder")
    result.removed = {"--quick": "nothing is measured without --measure, so leave it out"}
    text = (
        "measure CPU training with 1, 2 and 4 ranks, which takes a few minutes, and write FILE for `lowtide plan "
        f"--machine` (default: ${VARIABLE}, or machine.json in the cache folder); --folder adds the offload to files"
    )
    result.add_argument("--measure", type=output_file, metavar="FILE", nargs="?", const=default_path(), help=text)
    result.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    return result


@reports("env", OSError, ValueError)  # a ChildProcessError of `measure` is an OSError
def _measure(path: Path, folder: Path | None) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)  # before the minutes of measuring, and not behind them
    before: Mapping[str, Factors] = {}
    with suppress(ValueError):  # no file, or a damaged one, whose error says to measure again
        before = Measured.read(path).factors
    found = measure(lambda text: print(text, flush=True), folder)
    # Factors of GPUs stay valid. Those of the CPU corrected the numbers that were just replaced.
    factors = {key: factor for key, factor in before.items() if not key.startswith("cpu")}
    replace(found, factors=factors).write(path)
    print(f"written to {path}")
    return 0


def _sections(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    collected = collect_env.get_env_info()._asdict()  # type: ignore[no-untyped-call]
    processor = re.search(r"Model name: *(.*)", collected.pop("cpu_info") or "")
    installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    return {
        "versions": {
            **{name: facts[name] for name in ("python", "torch", "lowtide")},
            "sources": facts["lowtide_source"] or "",
            **{name: installed.get(name, "not installed") for name in ("triton", "numpy", "pydantic")},
        },
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


def _works(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return whether each feature works, and the reason why it does or does not."""
    shared: int = facts.get("free_shared_memory_bytes") or 0
    has_room, ssh = shared > 0 and os.access("/dev/shm", os.W_OK), shutil.which("ssh")
    no_ssh = "no `ssh` in the path; install OpenSSH's client to start jobs on other hosts"
    features: dict[str, Callable[[], str]] = {  # each raises ValueError with the reason if the feature does not work
        "cuda": lambda: _cuda(len(report_host().devices)),
        "nccl": _nccl,
        "triton kernels": _triton,
        "c++ compiler": lambda: " ".join(find_compiler()),  # its version is among the facts of torch
        "cpu update kernel": _cpu_kernel,
        "shared-memory transport": lambda: _needs(
            has_room, f"{size_text(shared)} free in /dev/shm", "/dev/shm is full or read-only"
        ),
        "parameters on nvme": lambda: _needs(
            PagePool.is_possible(), "the kernel can move pages", f"needs Linux 5.7 or newer, found {platform.release()}"
        ),
        "ssh": lambda: _needs(ssh is not None, str(ssh), no_ssh),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, reason in features.items():
        try:
            found[name] = {"works": True, "why": reason()}
        except (BuildError, ValueError) as error:
            found[name] = {"works": False, "why": str(error)}
    return found


def _needs(condition: bool, reason: str, otherwise: str) -> str:
    if not condition:
        raise ValueError(otherwise)
    return reason


def _cuda(num_devices: int) -> str:
    if torch.cuda.is_available():
        return f"torch finds {torch.cuda.device_count()} devices"
    if torch.version.cuda is None and torch.version.hip is None:
        hint = f", but this host has {num_devices} accelerators; install a GPU build" if num_devices else ""
        raise ValueError(f"torch {torch.__version__} is built without CUDA{hint}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        raise ValueError("CUDA_VISIBLE_DEVICES is empty, which hides all devices")
    raise ValueError("torch finds no CUDA device" + ("; check the version of the driver" if num_devices else ""))


def _nccl() -> str:
    _needs(torch.cuda.is_available(), "", "needs CUDA devices; CPU ranks use gloo and shared memory")
    try:
        return "version " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"torch is built without NCCL ({error})") from error


def _triton() -> str:
    _needs(has_triton(), "", "triton is not installed; eager torch operations replace it, slower on a GPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "in the interpreter (TRITON_INTERPRET=1): slow, for tests"
    _needs(torch.cuda.is_available(), "", "needs a GPU; eager torch operations replace it")
    _needs(not why_not_started(), "", f"{why_not_started()}; eager torch operations replace it, slower on a GPU")
    return f"triton {importlib.metadata.version('triton')}"


def _cpu_kernel() -> str:
    kernel, text = make_or_say_why(CpuKernel, *CPU_FORMS)  # as a training does
    return _needs(kernel is not None, text, text)


def _as_text(report: Mapping[str, Mapping[str, Any]]) -> str:
    blocks = {name: dict(map(_shown, section.items())) for name, section in report.items() if section}
    width = max(len(key) for block in blocks.values() for key in block)
    return "\n\n".join(
        "\n".join([name, *(f"  {key:<{width}}  {value}" for key, value in block.items())])
        for name, block in blocks.items()
    )


def _shown(entry: tuple[str, Any]) -> tuple[str, str]:
    key, value = entry
    if isinstance(value, Mapping):  # of a feature
        return key, f"{'yes' if value['works'] else 'no '}  {value['why']}"
    is_size = key.endswith("_bytes") and isinstance(value, int)
    return key.removesuffix("_bytes"), size_text(value) if is_size else str(value)
