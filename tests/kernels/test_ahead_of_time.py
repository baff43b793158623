"""Every kernel compiles for GPUs that are not here: no spills, few registers, wide loads."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.compiling import TARGETS, Compiled, launch_names

TIMEOUT_SECONDS = 600
WIDE_LOAD_BYTES = {"cuda": 16, "hip": 8}  # a warp of 64 threads has half as many elements of 2 bytes each


@pytest.fixture(scope="module")
def all_compiled() -> list[Compiled]:
    """In one process of its own for all targets: in this one Triton's kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nafter {done.stdout[-500:]}"
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", launch_names())
def test_kernels_compile_without_spills_and_with_wide_loads(name: str, all_compiled: list[Compiled]) -> None:
    found = [one for one in all_compiled if one.kernel.split(".")[0] == name]
    assert {TARGETS[one.target][0] for one in found} == {"cuda", "hip"}
    for one in found:
        assert one.spilled_bytes == 0, one
        assert one.registers <= one.register_budget, one
        assert one.widest_load_bytes >= WIDE_LOAD_BYTES[TARGETS[one.target][0]] or not one.must_be_vectorized, one


def test_kernels_of_blocks_are_compiled_once_for_any_number_of_blocks(all_compiled: list[Compiled]) -> None:
    """Also for the single block at the end of a buffer, and for no multiple of 16."""
    for name in ("sum_of_squares.squares", "quantized_blocks.quantize", "quantized_blocks.dequantize"):
        assert len({one.scalars for one in all_compiled if one.kernel == f"{name}_kernel"}) == 1, name
