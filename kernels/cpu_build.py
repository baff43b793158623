"""Build shared libraries from C++ sources of this package on first use, and cache them (`load_library`).

    key = hash(source, compiler's version, flags, processor)   ->   <cache>/<source's name>-<key>.so

The key contains the processor, so machines of different kinds can share a cache folder. Ranks that start together may
all build: each writes a temporary file and renames it to the same name, with the same content.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger("lowtide")
Made = TypeVar("Made")

ENVIRONMENT = "LOWTIDE_CPU_KERNEL"
COMPILERS = ("c++", "g++", "clang++")
NATIVE = ("-march=native",)
# Contracted multiply-adds would make the bits depend on processor and compiler.
# Without -fno-math-errno a square root is a call that may set errno, and no vector instruction.
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT_SECONDS = 120.0


class BuildError(Exception):
    """A library cannot be built or loaded on this machine; the text has the reason."""


def made_as_wanted(make: Callable[[tuple[str, ...]], Made], what: str, form: str, instead: str) -> Made | None:
    """Call `make_or_say_why`, log its text after `what`, the kernel's name, and return the kernel alone."""
    made, text = make_or_say_why(make, form, instead)
    is_as_wanted = made is not None or os.environ.get(ENVIRONMENT) == "torch"
    logger.log(logging.INFO if is_as_wanted else logging.WARNING, "%s: %s", what, text)
    return made


def make_or_say_why(make: Callable[[tuple[str, ...]], Made], form: str, instead: str) -> tuple[Made | None, str]:
    """Call `make` with the compiler flags that LOWTIDE_CPU_KERNEL selects. None if torch must do the work.

    The text says which instructions are in use, or the reason for None. make: takes flags as `load_library` does, and
    raises BuildError. form, instead: names of the kernel's C++ form and of its torch form in the text.
    Raises ValueError for a value of the variable that `optimizer_step.cpu_kernel` does not list.
    """
    wanted = os.environ.get(ENVIRONMENT, "native")
    if wanted not in ("native", "portable", "torch"):
        raise ValueError(f"{ENVIRONMENT}: expected native, portable or torch, found {wanted!r}")
    if wanted == "torch":
        return None, f"{instead}, because {ENVIRONMENT} is torch"
    attempts: list[tuple[str, tuple[str, ...]]] = [("all instructions of this processor", NATIVE)]
    attempts.append(("portable instructions", ()))
    reason = ""
    for instructions, flags in attempts if wanted == "native" else attempts[1:]:
        try:
            made = make(flags)
        # A compiler may not know this processor, so the portable form is next. If both fail, the first reason is told.
        except BuildError as error:
            reason = reason or str(error)
            continue
        return made, f"{form}, with {instructions}"
    return None, f"{instead}, because {reason}"


def load_library(source: Path, flags: Sequence[str] = NATIVE) -> ctypes.CDLL:
    """Load the library of a C++ source from the cache, or build it. Raises BuildError.

    flags: compiler flags for instructions, in addition to the flags of every build.
    """
    compiler = find_compiler()
    command = [*compiler, *_FLAGS, *flags]
    try:
        name = f"{source.stem}-{_key(source, compiler, command)}.so"
        try:
            return _load_from(cache_folder(), name, source, command)
        except OSError:  # the cache is not writable, full, or mounted noexec
            with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:  # a loaded library no longer needs its file
                return _load_from(Path(folder), name, source, command)
    except OSError as error:
        raise BuildError(f"the library cannot be written or loaded: {error}") from error


def find_compiler() -> list[str]:
    """Find the command of a C++ compiler: CXX, else the first of COMPILERS in the path. Raises BuildError."""
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]) is None:
            raise BuildError(f"CXX is {os.environ['CXX']!r}, and this program does not exist")
        return wanted
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"found no C++ compiler among {', '.join(COMPILERS)}; install a compiler, or name it in CXX")


def cache_folder() -> Path:
    """Return LOWTIDE_CACHE, else lowtide's folder in the user's cache. It may not exist yet."""
    if named := os.environ.get("LOWTIDE_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "lowtide"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = ("model name", "flags", "CPU part", "Features")  # of x86, then of ARM
    return "\n".join(next((line for line in lines if line.startswith(kind)), "") for kind in kinds)


def _key(source: Path, compiler: list[str], command: list[str]) -> str:
    # A compiler that is updated in place has the same path and a new version.
    version = _run([*compiler, "--version"])
    parts = [source.read_text(), version, *command, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _load_from(folder: Path, name: str, source: Path, command: list[str]) -> ctypes.CDLL:
    path = folder / name
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged; a new build replaces it
            pass
    # The library runs in this process, so no other user may write to its folder.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
    os.close(handle)
    try:
        _run([*command, "-o", temporary, str(source)])
        os.replace(temporary, path)
    finally:
        # Missing after the rename; present after an error.
        Path(temporary).unlink(missing_ok=True)
    return ctypes.CDLL(str(path))


def _run(command: list[str]) -> str:
    shown = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"`{shown}` took longer than {_TIMEOUT_SECONDS:g} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "without a message")
        raise BuildError(f"`{shown}` failed with exit code {done.returncode}: {said.strip()}")
    return done.stdout
