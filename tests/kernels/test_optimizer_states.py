"""Narrow optimizer states keep what training needs: the mean, every size of value, zero, and what does not change."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.optimizer_states import (
    StoredState,
    narrow_blocks,
    new_state,
    new_states,
    rounding_noise,
    stored_states,
    widened_blocks,
)
from lowtide.kernels.optimizer_step import update_shard
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import State
from tests.kernels.cpu_kernel import ADAGRAD, ADAM
from tests.kit.training import refusal

NARROW = [torch.bfloat16, torch.int8]
STEP = {torch.bfloat16: 2.0**-7, torch.int8: 2.0**-3, torch.uint8: 2.0**-3}  # between neighbours, over the value
REACH = {torch.int8: 2.0**-14, torch.uint8: 2.0**-30}  # smallest value that has the full step, over the block's largest


def random_bits(numel: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def state_of(name: str, values: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> StoredState:
    kept = State(name, is_mean_of_squares=name == "exp_avg_sq")
    state = stored_states(list(new_state(kept, values, {}, dtype).values()))[0]
    state.narrow(values, noise)
    return state


def values_of_all_sizes(numel: int, decades: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * 10 ** (-decades * torch.rand(numel, generator=generator))


def test_names_shapes_and_dtypes_of_new_states() -> None:
    master = torch.zeros(1000)
    described = {
        dtype: {name: (t.dtype, t.numel()) for name, t in new_states(OPTIMIZERS["adamw"], master, ADAM, dtype).items()}
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    assert described == {
        torch.float32: {"exp_avg": (torch.float32, 1000), "exp_avg_sq": (torch.float32, 1000)},
        torch.bfloat16: {"exp_avg": (torch.bfloat16, 1000), "exp_avg_sq": (torch.bfloat16, 1000)},
        torch.int8: {
            "exp_avg": (torch.int8, 1000),
            "exp_avg.scale": (torch.float32, 4),
            "exp_avg_sq": (torch.uint8, 1000),
            "exp_avg_sq.scale": (torch.float32, 4),
        },
    }
    assert all(not t.any() for name, t in new_states(OPTIMIZERS["adamw"], master, ADAM).items())


def test_wide_states_have_the_dtype_of_the_master_weights() -> None:
    states = new_states(OPTIMIZERS["lion"], torch.zeros(3, dtype=torch.float64), ADAM)
    assert states["exp_avg"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_the_start_value_is_kept(dtype: torch.dtype) -> None:
    state = stored_states(list(new_states(OPTIMIZERS["adagrad"], torch.zeros(300), ADAGRAD, dtype).values()))[0]
    torch.testing.assert_close(state.widened(), torch.full((300,), 0.2), rtol=STEP.get(state.payload.dtype, 0), atol=0)


def test_an_unknown_dtype_and_narrow_states_of_float64_weights_are_refused() -> None:
    text = refusal(new_states, OPTIMIZERS["adamw"], torch.zeros(3), ADAM, torch.float16)
    assert "state_dtype: expected float32 or bfloat16 or int8, found torch.float16" in text
    text = refusal(new_states, OPTIMIZERS["adamw"], torch.zeros(3).double(), ADAM, torch.int8)
    assert "expected float32 master weights for torch.int8 states, found torch.float64; set state_dtype" in text


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_the_error_is_below_a_step_whatever_the_size(dtype: torch.dtype, name: str) -> None:
    decades = 7 if dtype == torch.bfloat16 or name == "exp_avg_sq" else 3
    values = values_of_all_sizes(2000, decades)
    values = values.abs() if name == "exp_avg_sq" else values
    for noise in (None, random_bits(2000)):
        state = state_of(name, values, dtype, noise)
        error = (state.widened() - values).abs()
        allowed = values.abs() * STEP[state.payload.dtype] * (1.0 if noise is not None else 0.5001)
        if state.scale is not None:
            largest = torch.cat([block.abs().max().expand(len(block)) for block in values.split(256)])
            allowed = allowed.maximum(largest * REACH[state.payload.dtype] / 4)
        assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_the_mean_of_many_roundings_is_the_value(dtype: torch.dtype, name: str) -> None:
    """The error of a mean of 4000 roundings has a deviation of at most half a step / sqrt(4000)."""
    values = values_of_all_sizes(256, 2)
    values = values.abs() if name == "exp_avg_sq" else values
    found = state_of(name, values.repeat(4000), dtype, random_bits(4000 * 256)).widened().view(4000, 256)
    step = STEP[torch.int8 if dtype == torch.int8 else dtype]
    error = (found.double().mean(0) - values).abs()
    assert (error <= 5 * values.abs() * step / 2 / 4000**0.5 + values.abs() * 1e-6).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_what_does_not_change_is_stored_again_without_error(dtype: torch.dtype, name: str) -> None:
    values = values_of_all_sizes(1000, 6)
    values = values.abs() if name == "exp_avg_sq" else values
    first = state_of(name, values, dtype, random_bits(1000)).widened()
    for seed in range(5):
        again = state_of(name, first, dtype, random_bits(1000, seed)).widened()
        if dtype == torch.bfloat16:
            assert torch.equal(again, first)
            continue
        # A value that was rounded up to the free exponent moves the scale by one, and the evenly spaced codes with it.
        is_fine = first.abs() >= torch.cat([block.abs().max().expand(len(block)) for block in first.split(256)]) * (
            2.0**-13 if name == "exp_avg" else 2.0**-29
        )
        assert is_fine.sum() > 500
        assert torch.equal(again[is_fine], first[is_fine])


def test_a_mean_of_squares_is_never_rounded_to_zero() -> None:
    values = torch.ones(512)
    values[3:256] = 1e-30
    values[300] = 0.0
    for noise in (None, random_bits(512)):
        found = state_of("exp_avg_sq", values, torch.int8, noise).widened()
        assert ((found > 0) == (values > 0)).all()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_extreme_blocks(name: str) -> None:
    """Very large and small numbers keep their size; one that is not finite, or too large, breaks its block alone."""
    blocks = torch.tensor([8.0e37, 2.0**-120, 0.0, 1.0, 1.0, 1.0]).repeat_interleave(256)
    blocks[3 * 256 + 5], blocks[4 * 256 + 9], blocks[5 * 256] = torch.inf, torch.nan, 2.0**126
    found = state_of(name, blocks, torch.int8).widened().view(6, 256)
    torch.testing.assert_close(found[:3], blocks.view(6, 256)[:3], rtol=1 / 15, atol=0)
    assert found[3:].isnan().all()


def test_payload_and_scale_are_what_the_note_says() -> None:
    values = torch.tensor([1.5, -0.75, 1.5 * 2.0**-15, 0.0])
    payload, scale = torch.empty(4, dtype=torch.int8), torch.empty(1)
    narrow_blocks(values, None, payload, scale)
    assert scale.item() == 2.0  # one exponent above the largest value is free
    assert [code & 0xFF for code in payload.tolist()] == [0b0_1110_100, 0b1_1101_100, 0b0_0000_011, 0]
    assert torch.equal(widened_blocks(payload, scale), values)


def test_the_noise_differs_between_steps_and_elements() -> None:
    weight = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    noise = [rounding_noise(torch.zeros_like(weight), weight, step) for step in (1, 2)]
    for bit in range(20):
        ones = [(bits >> bit) & 1 for bits in noise]
        assert all(abs(int(one.sum()) - 5000) < 250 for one in ones)  # five deviations of 50
        assert abs(int((ones[0] ^ ones[1]).sum()) - 5000) < 250


@pytest.mark.parametrize("dtype", NARROW)
def test_a_second_moment_grows_and_decays(dtype: torch.dtype) -> None:
    """700 steps at beta2 0.999 leave half of a gradient's square; rounded to nearest, all of it would be left."""
    options = ADAM | {"betas": (0.9, 0.999), "weight_decay": 0.0, "lr": 1e-3}
    rule, master = OPTIMIZERS["adamw"], torch.randn(4096, generator=torch.Generator().manual_seed(0))
    tensors = list(new_states(rule, master, options, dtype).values())
    for step in range(1, 1401):
        gradient = torch.full_like(master, 1.0 if step <= 700 else 0.0)
        update_shard(rule, master, gradient, tensors, step, options, 1.0, None)
        if step == 700:
            grown = stored_states(tensors)[1].widened().mean().item()
    decayed = stored_states(tensors)[1].widened().mean().item()
    assert grown == pytest.approx(1 - 0.999**700, rel=0.02)
    assert decayed == pytest.approx(grown * 0.999**700, rel=0.05)
    nearest = StoredState(torch.full((1,), 0.77).bfloat16(), None)
    before = nearest.widened()
    nearest.narrow(before * 0.999)
    assert torch.equal(nearest.widened(), before)
