"""The first hour on a GPU: each part takes at most nine minutes and is useful alone.

  checks     versions; every kernel against float64; the tests that are marked gpu
  training   one rank: stages 0 to 3, fp32, bf16, fp16, every offload; losses beside the CPU's, waits of the host
  trace      one of eight simulated ranks: a profiler's trace, gaps per block, memory beside what is predicted
  bandwidth  kernels beside a copy, torch, torch.compile, and Liger where it is installed
  models     350M, 1.3B and 3B: tokens/s and peak memory beside torch's fused AdamW, FSDP2, DeepSpeed where it is there
  largest    the largest model in the device's memory, with each offload
  ranks      two ranks on one device, by gloo, and by NCCL where it lets them
  splits     layers, sequences and experts that ranks share: two ranks on one device, and one of eight simulated ones
  compiled   compiled blocks at stages 0 and 3: time, recompiles, graph breaks

They run in this order, each in a process of its own; after one that fails or is cut off the next one runs. The folder
gets results.json, results.md (rows for docs/performance.md), log.txt with all that was said, and the traces. Parts that
are measured later into the same folder take the place of what they had there.

What must be installed: Python 3.11 or newer with torch 2.11 or newer built for the device, numpy, pydantic, psutil and
rich; triton for the kernels, pytest for the tests. Liger (liger_kernel) and DeepSpeed take part where they can be
imported. lowtide itself is taken from this checkout and need not be installed. Nothing is downloaded. Where the machine
reaches no index, carry wheels: `pip download --only-binary=:all: -d wheels pydantic psutil rich` elsewhere, then
`pip install --no-index --find-links wheels --target site pydantic psutil rich` there, and PYTHONPATH=site.
Python is GPU_PYTHON, else the first of .venv, python3, python that has torch and sees an accelerator.

Example, all of it, two parts, and a rehearsal, for which no GPU is needed:

    benchmarks/gpu.sh --out gpu-results
    benchmarks/gpu.sh training models --only bf16 1.3B --out gpu-results
    benchmarks/gpu.sh --rehearse
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import _gpu_part

PARTS = tuple(_gpu_part.MEASURES)
LIMIT_SECONDS = 540.0
LEAVING_SECONDS = 20.0  # that a part has to stop its ranks
NEEDED = ("torch", "numpy", "pydantic", "psutil", "rich")
REHEARSAL = "LOWTIDE_REHEARSAL"  # as _device.py has it, which imports torch
ROOT = Path(__file__).parents[1]
LOG_FILE = "log.txt"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(
        "gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"some of: {', '.join(PARTS)} (default: all)")
    default = Path(os.environ.get("OUT") or "gpu-results")
    add("--out", type=Path, default=default, metavar="FOLDER", help="for what is found (default: $OUT, or gpu-results)")
    add("--only", nargs="+", default=[], metavar="TEXT", help="measure what has one of these in its name, and no more")
    add("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="time of a part (default: 540)")
    add("--rehearse", action="store_true", help="all of it at tiny sizes without a GPU: the numbers mean nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"PART: expected some of {', '.join(PARTS)}, found {', '.join(unknown)}")
    options.parts = [name for name in PARTS if name in options.parts or not options.parts]
    if not options.limit > 0:
        parser.error(f"--limit: expected seconds above 0, found {options.limit:g}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        parser.error(f"--out: expected a folder that can be written to, found {options.out} ({error.strerror})")
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        parser.error(f"expected {', '.join(missing)} for {sys.executable}, found none; --help says how to bring them")
    return options


@contextlib.contextmanager
def python_path() -> Iterator[str]:
    """The PYTHONPATH with which `lowtide` and `tests` are those of this checkout, installed or not."""
    with tempfile.TemporaryDirectory(prefix="lowtide-") as name:
        package = Path(name) / "lowtide"
        package.mkdir()
        for path in (ROOT / "lowtide").iterdir():
            (package / path.name).symlink_to(path)
        places = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        for module, folder in places.items():
            if module.count(".") == 1:
                (package / module.split(".")[1]).symlink_to(ROOT / folder)
        yield os.pathsep.join([name, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def rehearsal_device() -> str:
    """The pretended device where it can be built, else the CPU."""
    can_build = any(map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"])))
    return "pretend" if can_build and (ROOT / "tests" / "pretend").is_dir() else "cpu"


def environment_of(options: argparse.Namespace, path: str) -> dict[str, str]:
    """That of every part."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if options.rehearse:
        environment |= {REHEARSAL: os.environ.get(REHEARSAL) or rehearsal_device()}
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    else:
        environment.pop(REHEARSAL, None)
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `lowtide launch` sets it
    return environment


def run_parts(parts: list[str], options: argparse.Namespace, environment: dict[str, str]) -> str:
    """Measures parts in one process, and says how that ended: "done", "failed", or in words."""
    limit = options.limit * len(parts)
    job = {"folder": str(options.out.resolve()), "parts": parts, "only": options.only, "limit_seconds": limit}
    command = [sys.executable, str(ROOT / "benchmarks" / "_gpu_part.py"), json.dumps(job)]
    with (options.out / LOG_FILE).open("ab") as log, (options.out / LOG_FILE).open("rb") as said:
        said.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            is_over = show_until_end(process, said, time.monotonic() + limit)
        finally:
            stop(process)
        shutil.copyfileobj(said, sys.stdout.buffer)
    if is_over:
        return f"cut off after {limit:g} s"
    return {0: "done", 1: "failed"}.get(process.returncode, f"ended with status {process.returncode}")


def show_until_end(process: subprocess.Popen[bytes], said: BinaryIO, deadline: float) -> bool:
    """Copies what the process says to the screen until it ends; True where it has not at the deadline."""
    while process.poll() is None:
        shutil.copyfileobj(said, sys.stdout.buffer)
        sys.stdout.flush()
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs, with some seconds in which it ends its own processes."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def correct(folder: Path, part: str, ended: str) -> dict[str, Any]:
    """What a part has found. How it ended is known here alone where it was cut off, or has died."""
    found: dict[str, Any] = _gpu_part.read(folder).get(part) or _gpu_part.nothing({})
    if found["status"] == _gpu_part.RUNNING:
        found["status"] = ended
        _gpu_part.change(folder, part, found)
    return found


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running part is stopped too
    # A rehearsal needs no time limit for each part, and the imports of one process are enough for all.
    groups = [options.parts] if options.rehearse else [[part] for part in options.parts]
    for part in options.parts:
        _gpu_part.change(options.out, part, _gpu_part.nothing({}))
    with python_path() as path:
        environment = environment_of(options, path)
        for parts in groups:
            ended = run_parts(parts, options, environment)
            for part in parts:
                correct(options.out, part, ended)
    parts = _gpu_part.read(options.out)
    is_done = True
    for part in options.parts:
        found = parts[part]
        is_done &= found["status"] == "done"
        rows = sum(map(len, found["tables"].values()))
        print(f"{part:<10} {found['status']:<20} {found['seconds']:>6.0f} s  {rows:>3} rows")
        for failure in found["failures"]:
            print(f"           {failure}")
    print(f"{options.out / _gpu_part.JSON_FILE}, {_gpu_part.MARKDOWN_FILE}, {LOG_FILE}")
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
