"""Fixtures of the kernels' tests. Triton's kernels are interpreted in them, on the CPU."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.kernels.optimizer_step import CpuKernel

# Read where a kernel is defined, so before any module of lowtide.kernels.triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
COMPILING_SECONDS = 600


def mend_interpreter() -> None:
    """Triton 3.6 takes int() of an array of one element in each loop over range(), which NumPy 2.4 made an error."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_language_once() -> None:
    """The interpreter looks through all of Triton's language when a kernel calls a function, for what it has patched
    when the kernel began: a fifth of the time of the kernels' tests.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patched(function: Any) -> Any:
        seen = [one for one in function.__globals__.values() if one is language or one is language.core]
        if seen and all(one.static_print is print for one in seen):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patched


if importlib.util.find_spec("triton") is not None:
    patch_language_once()
if importlib.util.find_spec("triton") is not None and importlib.metadata.version("triton").startswith("3.6."):
    mend_interpreter()


@pytest.fixture(scope="session")
def outside_the_interpreter() -> list[Any]:
    """What `compiling.py` prints of compiled kernels and of launches."""
    command, checkout = [sys.executable, "-m", "tests.kernels.compiling"], Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=COMPILING_SECONDS
    )
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nafter {done.stdout[-500:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def kernel() -> CpuKernel:
    """The C++ optimizer step with all instructions of this processor."""
    return CpuKernel()


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers drawn afresh in every run; the seed is printed, so that a failure can be repeated."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty gives is full of NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    # A property of the module's class, which torch puts there at run time.
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
