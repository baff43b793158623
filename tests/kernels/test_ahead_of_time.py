"""Every kernel compiles for GPUs that are not here: no spills, few registers, wide loads."""

from typing import Any

import pytest

from tests.kernels.compiling import TARGETS, Compiled, launch_names

WIDE_LOAD_BYTES = {"cuda": 16, "hip": 8}  # a warp of 64 threads has half as many elements of 2 bytes each


@pytest.fixture(scope="module")
def all_compiled(outside_the_interpreter: list[Any]) -> list[Compiled]:
    return [Compiled(**found) for found in outside_the_interpreter if isinstance(found, dict)]


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
