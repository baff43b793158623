"""The C++ optimizer step computes what torch's optimizers do, whatever the dtypes, sizes and addresses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import CpuKernel, ShardUpdate
from lowtide.optimizers import OPTIMIZERS
from tests.kernels.cpu_kernel import ADAM, CASES, SGD, STATE_DTYPES, Shard, needs_compiler, start_values
from tests.kernels.test_optimizer_step import Lion, run_torch
from tests.kit.grids import pairs

pytestmark = needs_compiler

TWINS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
}
# A step makes about ten roundings of 2^-24 in an update of at most a few lr, and one in the weight: four steps with
# lr 0.1 and weights below 5 stay under 4 * (5 + 0.1 * 10 * 3) * 2^-24 = 2e-6.
TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 2e-6}
ODD_SIZES = [1, 7, 16, 255, 257, 1023, 1025, 100_003]


def exact_weights(name: str, weight: Tensor, gradients: list[Tensor], scale: float = 1.0) -> Tensor:
    """What torch's optimizer gives in float64."""
    rule, options = CASES[name]
    return run_torch(TWINS[rule.name], options, weight.double(), [g.double() * scale for g in gradients])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("numel", ODD_SIZES)
def test_a_rule_is_its_torch_twin(kernel: CpuKernel, name: str, numel: int) -> None:
    weight, gradients = start_values(numel)
    shard = Shard(*CASES[name], weight)
    for step, gradient in enumerate(gradients, start=1):
        shard.update(kernel, gradient, step)
    torch.testing.assert_close(shard.master.double(), exact_weights(name, weight, gradients), **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16])
def test_unscale_update_and_cast_are_one_pass(
    kernel: CpuKernel, name: str, gradient_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    weight, gradients = start_values(3001)
    narrow = [(gradient * 64).to(gradient_dtype) for gradient in gradients]
    before = [gradient.clone() for gradient in narrow]
    shard = Shard(*CASES[name], weight, out_dtype=out_dtype)
    for step, gradient in enumerate(narrow, start=1):
        shard.update(kernel, gradient, step, scale=1 / 64)
    torch.testing.assert_close(shard.master.double(), exact_weights(name, weight, narrow, 1 / 64), **TOLERANCE)
    if shard.out is not None:
        assert torch.equal(shard.out, shard.master.to(shard.out.dtype))
    for found, expected in zip(narrow, before, strict=True):
        assert torch.equal(found, expected)  # the gradient is only read


@pytest.mark.parametrize(
    ("name", "state_dtype", "gradient_dtype", "out_dtype"),
    pairs(
        list(CASES),
        (torch.bfloat16, torch.int8),
        (torch.float32, torch.bfloat16, torch.float16),
        (None, torch.bfloat16, torch.float16),
    ),
    ids=str,
)
def test_the_first_step_does_not_depend_on_how_states_are_kept(
    kernel: CpuKernel, name: str, state_dtype: torch.dtype, gradient_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """Zeros are stored exactly, and an update uses the states before they are rounded. Then they are rounded by one
    step at most: 2^-7 of the value in bfloat16, 2^-3 in 8 bits, or the smallest code of the block."""
    rule, options = CASES[name]
    options = options | ({"initial_accumulator_value": 0.0} if rule.name == "adagrad" else {})
    weight, (gradient, *_) = start_values(1500)
    wide = Shard(rule, options, weight, out_dtype=out_dtype)
    narrow = Shard(rule, options, weight, state_dtype, out_dtype)
    wide.update(kernel, gradient.to(gradient_dtype), 1)
    narrow.update(kernel, gradient.to(gradient_dtype), 1)
    assert torch.equal(narrow.master, wide.master)
    if narrow.out is not None and wide.out is not None:
        assert torch.equal(narrow.out, wide.out)
    for kept, state in zip(rule.states_for(options), stored_states(list(narrow.states.values())), strict=True):
        exact = wide.states[kept.name]
        if state.scale is None:
            torch.testing.assert_close(state.widened(), exact, rtol=2**-7, atol=0)
        else:
            smallest = state.scale.repeat_interleave(256)[: exact.numel()] * 2.0**-17
            assert ((state.widened() - exact).abs() <= (exact.abs() / 8).maximum(smallest)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_round_to_nearest_even_as_torch(kernel: CpuKernel, dtype: torch.dtype) -> None:
    """Every value of the narrow dtype, the middles between neighbours and what lies beside them; NaN stays NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    middles = every.view(torch.int32) | {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}[dtype]
    values = torch.cat([every, *((middles + beside).view(torch.float32) for beside in (-1, 0, 1))])
    extremes = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -(2.0**-26), 3.4e38])
    values = torch.cat([values, extremes])
    values = values[values.isnan() | (values == 0) | (values.abs() >= 2.0**-126)]  # float32's denormals are zero here
    rule, _ = CASES["sgd"]
    options = SGD | {"momentum": 0.0, "lr": 0.0, "weight_decay": 0.0}
    shard = Shard(rule, options, values, out_dtype=dtype)
    shard.update(kernel, torch.zeros_like(values), 1)
    assert shard.out is not None
    expected = values.to(dtype)
    is_zero_times_infinity = values.isinf()  # w * decay: not a weight that training has
    same = (shard.out == expected) | (shard.out.isnan() & values.isnan()) | is_zero_times_infinity
    assert same.all(), values[~same][:5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_read_exactly(kernel: CpuKernel, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite() & ((every == 0) | (every.float().abs() > 2.0**-125))]
    rule, _ = CASES["sgd"]
    options = SGD | {"momentum": 0.0, "lr": 1.0, "weight_decay": 0.0}
    shard = Shard(rule, options, torch.zeros(every.numel()))
    shard.update(kernel, every, 1)
    assert torch.equal(shard.master, -every.float())


def test_autograd_notices_that_weights_changed(kernel: CpuKernel) -> None:
    """A backward pass through values from before the step is refused, not wrong."""
    weight, (gradient, *_) = start_values(64)
    shard = Shard(*CASES["adamw"], weight, out_dtype=torch.bfloat16)
    assert shard.out is not None
    x = torch.ones(64, requires_grad=True)
    losses = [(x * shard.master).sum(), (x * shard.out).sum()]
    shard.update(kernel, gradient, 1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_nothing_is_done_to_an_empty_shard(kernel: CpuKernel, name: str, state_dtype: torch.dtype) -> None:
    shard = Shard(*CASES[name], torch.empty(0), state_dtype, torch.bfloat16)
    shard.update(kernel, torch.empty(0), 1)
    assert all(tensor.numel() == 0 for tensor in shard.tensors().values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_zeros_stay_zeros_without_gradient(kernel: CpuKernel, name: str, state_dtype: torch.dtype) -> None:
    """Padding between parameters is updated with them, and must never become anything else."""
    shard = Shard(*CASES[name], torch.zeros(700), state_dtype, torch.bfloat16)
    for step in range(1, 5):
        shard.update(kernel, torch.zeros(700), step)
    assert shard.out is not None
    assert not shard.master.any() and not shard.out.any()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_gradient_that_is_nan_shows_in_weight_and_states(kernel: CpuKernel, state_dtype: torch.dtype) -> None:
    weight, (gradient, *_) = start_values(600)
    gradient[300] = torch.nan
    shard = Shard(*CASES["adamw"], weight, state_dtype, torch.bfloat16)
    shard.update(kernel, gradient, 1)
    assert shard.out is not None
    assert shard.master.isnan().nonzero().tolist() == shard.out.isnan().nonzero().tolist() == [[300]]
    for state in stored_states(list(shard.states.values())):
        broken = state.widened().isnan().nonzero().flatten().tolist()
        assert broken == (list(range(256, 512)) if state_dtype == torch.int8 else [300])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_stretches_have_options_of_their_own(kernel: CpuKernel, state_dtype: torch.dtype) -> None:
    """Weight decay for some, in stretches that begin within blocks and vectors; each as if it were alone."""
    weight, gradients = start_values(1200)
    options = [ADAM, ADAM | {"weight_decay": 0.0, "lr": 0.1}, ADAM | {"betas": (0.5, 0.9)}]
    ends = [5, 16, 300, 301, 1040, 1200]
    runs: list[tuple[int, dict[str, Any]]] = [(end, options[i % 3]) for i, end in enumerate(ends)]
    found = Shard(*CASES["adamw"], weight, state_dtype)
    alone = [Shard(CASES["adamw"][0], chosen, weight, state_dtype) for chosen in options]
    for step, gradient in enumerate(gradients if state_dtype != torch.int8 else gradients[:1], start=1):
        found.update(kernel, gradient, step, runs=runs)
        for shard in alone:
            shard.update(kernel, gradient, step)
    start = 0
    for i, end in enumerate(ends):
        assert torch.equal(found.master[start:end], alone[i % 3].master[start:end])
        start = end


def test_every_optimizer_that_has_a_kernel_is_tested_here() -> None:
    assert {rule.name for rule, _ in CASES.values()} == {one.name for one in OPTIMIZERS.values() if one.coefficients}


@pytest.mark.parametrize(
    "change",
    [
        {"master": torch.zeros(8, dtype=torch.float64)},
        {"gradient": torch.zeros(8, dtype=torch.float64)},
        {"gradient": torch.zeros(16)[::2]},
        {"out": torch.zeros(8, dtype=torch.float64)},
        {"master": torch.zeros(8, device="meta")},
        {"master": torch.zeros(8, dtype=torch.bfloat16)},
        {"remainder": torch.zeros(8, dtype=torch.bfloat16)},
    ],
)
def test_what_it_does_not_serve_is_left_to_torch(kernel: CpuKernel, change: dict[str, Any]) -> None:
    rule, options = CASES["adamw"]
    states = stored_states(list(new_states(rule, torch.zeros(8), options).values()))
    asked = ShardUpdate(torch.zeros(8), torch.zeros(8), states, [(8, options)], [1], None)
    assert kernel.serves(rule, asked)
    assert not kernel.serves(rule, replace(asked, **change))
    assert not kernel.serves(replace(rule, title="Mine"), asked)
    assert not kernel.serves(replace(rule, coefficients=None), asked)
