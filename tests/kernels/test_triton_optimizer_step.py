"""The optimizer step in Triton's interpreter equals the rules in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import update_shard
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import Optimizer
from tests.kernels.cpu_kernel import CASES
from tests.kernels.exact import DTYPES, assert_near_float64
from tests.kernels.optimizer_rules import STEP, Start, magnitudes

SCALE = 0.3125
ADAMW, ADAM_OPTIONS = CASES["adamw"]
STEP_OF = {torch.bfloat16: 2.0**-7, torch.int8: 2.0**-3, torch.uint8: 2.0**-3}  # between neighbours, over the value
SMALLEST = {torch.bfloat16: 0.0, torch.int8: 2.0**-16, torch.uint8: 2.0**-32}  # step, over the block's largest value


def exact_step(rule: Optimizer, options: dict[str, Any], start: Start) -> tuple[Tensor, list[Tensor]]:
    """Master weights and states after the step, in float64."""
    master, states = start.master.double(), [value.double() for value in start.values]
    update_shard(rule, master, start.gradient.double(), states, STEP, options, SCALE, None)
    return master, states


def largest_of_blocks(values: Tensor) -> Tensor:
    return torch.cat([block.max().expand(len(block)) for block in values.abs().split(256)])


@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_rule(name: str, gradient_dtype: torch.dtype, generator: torch.Generator) -> None:
    rule, options = CASES[name]
    start = Start.drawn(rule, options, 1500, generator, gradient_dtype=gradient_dtype)
    master, states = exact_step(rule, options, start)
    size = magnitudes(name, options, start, states, SCALE)
    gradient = start.gradient.clone()
    update_shard(rule, start.master, gradient, start.states, STEP, options, SCALE, None, backend="triton")
    assert torch.equal(gradient, start.gradient)
    assert_near_float64(start.master, master, magnitude=size[0], steps=16)
    for found, exact, of_state in zip(start.states, states, size[1:], strict=True):
        assert_near_float64(found, exact, magnitude=of_state, steps=16)


@pytest.mark.parametrize("numel", [1, 255, 256, 1023, 1024, 1025, 2305])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_sizes_that_do_not_divide(numel: int, state_dtype: torch.dtype, generator: torch.Generator) -> None:
    start = Start.drawn(ADAMW, ADAM_OPTIONS, numel, generator, state_dtype)
    master, states = exact_step(ADAMW, ADAM_OPTIONS, start)
    size = magnitudes("adamw", ADAM_OPTIONS, start, states, SCALE)
    # What lies behind the tensors must stay as it is.
    places = [torch.cat([t, t.new_ones(2000)]) for t in (start.master, *start.states)]
    parts = [place[: t.numel()] for place, t in zip(places, (start.master, *start.states), strict=True)]
    out = torch.full((numel + 2000,), torch.nan, dtype=torch.bfloat16)
    update_shard(ADAMW, parts[0], start.gradient, parts[1:], STEP, ADAM_OPTIONS, SCALE, out[:numel], backend="triton")
    for place, part in zip(places, parts, strict=True):
        assert torch.equal(place[part.numel() :], torch.ones(2000, dtype=part.dtype))
    assert out[numel:].isnan().all()
    assert_near_float64(parts[0], master, magnitude=size[0], steps=16)
    assert_near_float64(out[:numel], parts[0].double())
    for state, exact, of_state in zip(stored_states(parts[1:]), states, size[1:], strict=True):
        error = (state.widened().double() - exact).abs()
        bound = STEP_OF.get(state.payload.dtype, 0.0) * exact.abs() + 16 * 2.0**-23 * of_state
        if state.scale is not None:
            bound += SMALLEST[state.payload.dtype] * largest_of_blocks(exact)
        assert (error <= bound).all()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master_dtype", DTYPES, ids=str)
def test_weights_of_every_dtype(master_dtype: torch.dtype, out_dtype: torch.dtype, generator: torch.Generator) -> None:
    start = Start.drawn(ADAMW, ADAM_OPTIONS, 1100, generator, master_dtype=master_dtype)
    master, states = exact_step(ADAMW, ADAM_OPTIONS, start)
    size = magnitudes("adamw", ADAM_OPTIONS, start, states, SCALE)
    out = torch.full((1100,), torch.nan, dtype=out_dtype)
    update_shard(ADAMW, start.master, start.gradient, start.states, STEP, ADAM_OPTIONS, SCALE, out, backend="triton")
    assert_near_float64(start.master, master, magnitude=size[0], steps=16)
    assert_near_float64(out, start.master.double())
    assert all(state.dtype == torch.float32 for state in start.states)


def test_an_empty_shard_stays_empty() -> None:
    empty = torch.empty(0)
    states = list(new_states(ADAMW, empty, ADAM_OPTIONS, torch.int8).values())
    update_shard(ADAMW, empty, empty, states, 1, ADAM_OPTIONS, 1.0, empty.half(), backend="triton")


def test_padding_stays_zero() -> None:
    for name, (rule, options) in CASES.items():
        master, out = torch.zeros(300), torch.ones(300, dtype=torch.bfloat16)
        states = list(new_states(rule, master, options, torch.int8).values())
        for step in (1, 2):
            update_shard(rule, master, torch.zeros(300), states, step, options, 1.0, out, backend="triton")
        assert not master.any() and not out.any(), name


def test_an_optimizer_without_a_kernel_is_an_error() -> None:
    rule = replace(OPTIMIZERS["sgd"], title="Mine", coefficients=None)
    expected = 'optimizer_step: backend "triton" does not take the optimizer "mine" without a kernel; use "auto"'
    options = CASES["sgd"][1]
    with pytest.raises(ValueError, match=expected):
        update_shard(rule, torch.ones(3), torch.ones(3), [], 1, options, 1.0, None, backend="triton")
    master = torch.ones(3)
    update_shard(rule, master, torch.ones(3), [], 1, options, 1.0, None)
    assert (master < 1).all()


def test_tensors_that_triton_does_not_take_are_errors() -> None:
    momentum, options = CASES["sgd with momentum"]
    wide = torch.ones(6)[::2]
    expected = 'optimizer_step: backend "triton" does not take non-contiguous tensors; use "auto"'
    with pytest.raises(ValueError, match=expected):
        update_shard(momentum, wide, torch.ones(3), [torch.ones(3)], 1, options, 1.0, None, backend="triton")
    expected = 'optimizer_step: backend "triton" does not take states of torch.float16; use "auto"'
    half = [torch.ones(3, dtype=torch.float16)]
    with pytest.raises(ValueError, match=expected):
        update_shard(momentum, torch.ones(3), torch.ones(3), half, 1, options, 1.0, None, backend="triton")
