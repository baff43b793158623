"""A quarter of an hour on a GPU, in parts that are useful alone, the most valuable first.

  language_models  Qwen2 of 0.5B, 1.5B, 4B and 7B: tokens/s, MFU, milliseconds until launched, peaks and losses beside
                   torch, torch.compile, FSDP2, Liger and DeepSpeed
  checks           every kernel against float64; the tests that are marked gpu
  training         one rank: stages, precisions, every offload, compiled blocks; losses beside the CPU's

Each runs in a process of its own, for at most so many seconds; after one that fails or is cut off the next one runs.
The folder gets results.json and log.txt with all that was said. Run again with the same folder, a part that has not
come to its end goes on where it was. Kernels are timed by kernels.py.

Needed are Python 3.11, torch 2.11 or newer built for the device, numpy, pydantic, psutil and rich; transformers for
language models, triton for kernels, pytest for tests. lowtide itself is taken from this checkout. Where the machine
reaches no index, carry wheels: `pip download --only-binary=:all: -d wheels pydantic psutil rich` elsewhere, then `pip
install --no-index --find-links wheels --target site pydantic psutil rich` there, and PYTHONPATH=site. Python is
GPU_PYTHON, else the first of .venv, python3, python that has torch and sees an accelerator.

Example, all of it, two parts, and a rehearsal, for which no GPU is needed:

    benchmarks/gpu.sh --out gpu-results
    benchmarks/gpu.sh language_models --seconds 200 --only 1.5B --out gpu-results
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

import _gpu_part

PARTS = tuple(_gpu_part.PARTS)
LEAVING_SECONDS = 20.0  # that a part has to stop its ranks
NEEDED = ("torch", "numpy", "pydantic", "psutil", "rich")
REHEARSAL = "LOWTIDE_REHEARSAL"  # as _device.py has it, which imports torch
ROOT = Path(__file__).parents[1]
LOG_FILE = "log.txt"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = argparse.ArgumentParser(
        "gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"some of: {', '.join(PARTS)} (default: all)")
    default = Path(os.environ.get("OUT") or "gpu-results")
    add("--out", type=Path, default=default, metavar="FOLDER", help="for what is found (default: $OUT, or gpu-results)")
    add("--only", nargs="+", default=[], metavar="TEXT", help="measure what has one of these in its name, and no more")
    times = ", ".join(f"{part.seconds:.0f}" for part in _gpu_part.PARTS.values())
    add("--seconds", type=float, help=f"time of each part, with its imports (default: {times})")
    add("--rehearse", action="store_true", help="all of it at tiny sizes without a GPU: the numbers mean nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"PART: expected some of {', '.join(PARTS)}, found {', '.join(unknown)}")
    options.parts = [name for name in PARTS if name in options.parts or not options.parts]
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds: expected more than 0, found {options.seconds:g}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"--out: expected a folder that can be written to, found {options.out} ({error.strerror})")
    if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
        parser.error(f"expected {', '.join(missing)} for {sys.executable}, found none; --help says how to bring them")
    return options


@contextlib.contextmanager
def python_path() -> Iterator[str]:
    """Give the PYTHONPATH with which `lowtide` and `tests` are those of this checkout, installed or not."""
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


def environment_of(is_rehearsal: bool, path: str) -> dict[str, str]:
    """Return the environment of every part. A rehearsal has the pretended device if it can be built, else the CPU."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if is_rehearsal:
        can_build = any(map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"])))
        environment.setdefault(REHEARSAL, "pretend" if can_build and (ROOT / "tests" / "pretend").is_dir() else "cpu")
        return environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(REHEARSAL, None)
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `lowtide launch` sets it
    return environment


def run_part(part: str, options: argparse.Namespace, environment: dict[str, str]) -> str:
    """Measure a part in a process, show its output, and return how it ended."""
    least = 600.0 if options.rehearse else 0.0  # the machine of a rehearsal is slow, and its times mean nothing
    limit = options.seconds or max(least, _gpu_part.PARTS[part].seconds)
    job = {"folder": str(options.out.resolve()), "part": part, "only": options.only, "seconds": limit}
    command = [sys.executable, str(ROOT / "benchmarks" / "_gpu_part.py"), json.dumps(job)]
    deadline = time.monotonic() + limit
    with (options.out / LOG_FILE).open("ab") as log, (options.out / LOG_FILE).open("rb") as said:
        said.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                shutil.copyfileobj(said, sys.stdout.buffer)
                sys.stdout.flush()
                time.sleep(0.1)
        finally:
            is_over = process.poll() is None
            stop(process)
        shutil.copyfileobj(said, sys.stdout.buffer)
    if is_over:
        return f"cut off after {limit:g} s"
    ends = {0: _gpu_part.DONE, 1: "failed", _gpu_part.OUT_OF_TIME_STATUS: "out of time"}
    return ends.get(process.returncode, f"ended with status {process.returncode}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs; it gets some seconds in which it ends its own processes."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running part is stopped too
    for part in options.parts:
        _gpu_part.begin(options.out, part)
    with python_path() as path:
        environment = environment_of(options.rehearse, path)
        for part in options.parts:
            ended = run_part(part, options, environment)
            found = _gpu_part.read(options.out)[part]
            if found["status"] == _gpu_part.RUNNING:  # rows are left, or it was cut off, or has died
                _gpu_part.change(options.out, part, {**found, "status": ended})
    results = _gpu_part.read(options.out)
    for part in options.parts:
        found = results[part]
        rows = sum(map(len, found["tables"].values()))
        print(f"{part:<15} {found['status']:<20} {found['seconds']:>6.0f} s  {rows:>3} rows")
        for failure in found["failures"]:
            print(f"                {failure}")
    print(f"{options.out / _gpu_part.JSON_FILE}, {LOG_FILE}")
    return 0 if all(results[part]["status"] == _gpu_part.DONE for part in options.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
