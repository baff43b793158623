"""One optimizer step on a flat shard is that of torch, in every tier: torch's kernels, the C++ pass, Triton's kernel.

Triton's kernel is interpreted, so that casts to bfloat16 are cut there, and products are not fused with sums.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.optimizer_step import CHUNK_NUMEL, cpu_kernel, update_runs, update_shard
from lowtide.optimizers import OPTIMIZERS
from tests.kernels.cpu_kernel import (
    ADAM,
    CASES,
    STATE_DTYPES,
    TIERS,
    Shard,
    Tier,
    assert_same_bits,
    in_turn,
    needs_compiler,
    start_values,
    trained,
)
from tests.kernels.exact import DTYPES
from tests.kit.grids import pairs
from tests.kit.training import refusal

NARROW = (torch.bfloat16, torch.float16)
EXACT_TIERS: list[Any] = [pytest.param("auto", marks=needs_compiler), "triton"]  # an element's bits depend on it alone
VECTORS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch has another order of operations"
)
# A step makes about ten roundings of 2^-24 in an update of at most a few lr, and one in the weight: four steps with
# lr 0.1 and weights below 5 stay under 4 * (5 + 0.1 * 10 * 3) * 2^-24 = 2e-6. States have sums of gradients up to 40.
TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 2e-6}
TOLERANCE_OF_STATES: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-5}


@pytest.mark.parametrize("tier", TIERS)
def test_momentum_that_pauses_continues_as_in_torch(tier: Backend) -> None:
    """A scheduler may set the momentum to 0 and back: the buffer keeps its value meanwhile."""
    rule, options = CASES["sgd with momentum"]
    weight, gradients = start_values(300)
    param, shard = nn.Parameter(weight.clone()), Shard(rule, dict(options), weight)
    twin = torch.optim.SGD([param], **options)
    for step, (momentum, gradient) in enumerate(zip((0.9, 0.0, 0.9, 0.9), gradients, strict=True), start=1):
        shard.options["momentum"] = twin.param_groups[0]["momentum"] = momentum
        shard.update(tier, gradient, step)
        param.grad = gradient.clone()
        twin.step()
    torch.testing.assert_close(shard.master, param.detach(), **TOLERANCE)


def is_rounded(out: Tensor, master: Tensor, tier: Tier) -> bool:
    """out is master in its dtype: to the nearest, or within a unit of the last place."""
    if tier != "triton":
        return torch.equal(out, master.to(out.dtype))
    info = torch.finfo(out.dtype)
    return bool(((out.float() - master).abs() <= info.eps * master.abs() + info.smallest_normal).all())


@pytest.mark.parametrize(
    ("name", "tier", "gradient_dtype", "out_dtype"), pairs(list(CASES), TIERS, DTYPES, (None, *NARROW)), ids=str
)
def test_unscale_update_and_cast_are_one_pass(
    name: str, tier: Backend, gradient_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    weight, gradients = start_values(3001)
    found, exact = Shard(*CASES[name], weight, out_dtype=out_dtype), Shard(*CASES[name], weight.double())
    for step, gradient in enumerate(gradients, start=1):
        narrow = (gradient * 64).to(gradient_dtype)
        found.update(tier, narrow, step, scale=1 / 64)
        exact.update("reference", narrow.double(), step, scale=1 / 64)
    torch.testing.assert_close(found.master.double(), exact.master, **TOLERANCE)
    for kind, state in exact.states.items():
        torch.testing.assert_close(found.states[kind].double(), state, **TOLERANCE_OF_STATES)
    assert found.out is None or is_rounded(found.out, found.master, tier)


@pytest.mark.parametrize(
    ("name", "tier", "state_dtype", "gradient_dtype"),
    pairs(list(CASES), TIERS, (torch.bfloat16, torch.int8), DTYPES),
    ids=str,
)
def test_the_first_step_does_not_depend_on_how_states_are_kept(
    name: str, tier: Backend, state_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    """Zeros are stored exactly, and an update uses the states before they are rounded. Then they are rounded by one
    step at most: 2^-7 of the value in bfloat16, 2^-3 in 8 bits, or the smallest code of the block."""
    rule, options = CASES[name]
    options = options | ({"initial_accumulator_value": 0.0} if rule.name == "adagrad" else {})
    weight, (gradient, *_) = start_values(1500)
    wide, narrow = (Shard(rule, options, weight, dtype, torch.bfloat16) for dtype in (torch.float32, state_dtype))
    for shard in (wide, narrow):
        shard.update(tier, gradient.to(gradient_dtype), 1)
    assert torch.equal(narrow.master, wide.master) and narrow.out is not None and wide.out is not None
    assert torch.equal(narrow.out, wide.out)
    for kept, state in zip(rule.states_for(options), narrow.stored, strict=True):
        exact = wide.states[kept.name]
        if state.scale is None:
            torch.testing.assert_close(state.widened(), exact, rtol=2**-7, atol=0)
        else:
            smallest = state.scale.repeat_interleave(256)[: exact.numel()] * 2.0**-17
            assert ((state.widened() - exact).abs() <= (exact.abs() / 8).maximum(smallest)).all()


@pytest.mark.parametrize("tier", TIERS)
def test_empty_shards_stay_empty_and_zeros_without_gradient_zeros(tier: Backend) -> None:
    """Padding between parameters is updated with them, and must never become anything else."""
    for name, rule, options, state_dtype in in_turn():
        for numel in (0, 700):
            shard = Shard(rule, options, torch.zeros(numel), state_dtype, torch.bfloat16)
            for step in (1, 2):
                shard.update(tier, torch.zeros(numel), step)
            assert shard.out is not None and not shard.master.any() and not shard.out.any(), name


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_a_gradient_that_is_nan_shows_in_weight_and_states(tier: Backend, state_dtype: torch.dtype) -> None:
    weight, (gradient, *_) = start_values(600)
    gradient[300] = torch.nan
    shard = Shard(*CASES["adamw"], weight, state_dtype, torch.float16)
    shard.update(tier, gradient, 1)
    assert shard.out is not None
    assert shard.master.isnan().nonzero().tolist() == shard.out.isnan().nonzero().tolist() == [[300]]
    for state in shard.stored:
        broken = state.widened().isnan().nonzero().flatten().tolist()
        assert broken == (list(range(256, 512)) if state_dtype == torch.int8 else [300])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("tier", EXACT_TIERS)
def test_stretches_have_options_of_their_own(tier: Backend, state_dtype: torch.dtype) -> None:
    """Weight decay for some, in stretches that begin within blocks and vectors; each as if it were alone."""
    weight, gradients = start_values(2100)
    options = [ADAM, ADAM | {"weight_decay": 0.0, "lr": 0.1}, ADAM | {"betas": (0.5, 0.9)}]
    ends = [0, 5, 16, 300, 301, 1024, 1025, 2048, 2100]
    runs: list[tuple[int, dict[str, Any]]] = [(end, options[i % 3]) for i, end in enumerate(ends[1:])]
    found = Shard(*CASES["adamw"], weight, state_dtype)
    alone = [Shard(CASES["adamw"][0], chosen, weight, state_dtype) for chosen in options]
    for step, gradient in enumerate(gradients[: 1 if state_dtype == torch.int8 else 2], start=1):
        found.update(tier, gradient, step, runs=runs)
        for shard in alone:
            shard.update(tier, gradient, step)
    for i, (start, end) in enumerate(pairwise(ends)):
        assert torch.equal(found.master[start:end], alone[i % 3].master[start:end])


@pytest.mark.parametrize(("tier", "state_dtype"), pairs(TIERS, STATE_DTYPES), ids=str)
def test_a_shard_may_be_cut_at_blocks(tier: Backend, state_dtype: torch.dtype) -> None:
    whole = trained(tier, "adamw", state_dtype, 1800, 2)
    assert_same_bits(trained(tier, "adamw", state_dtype, 1800, 2, cuts=(256 * 2, 256 * 5)), whole)


@needs_compiler
@VECTORS
@pytest.mark.parametrize(
    ("name", "state_dtype", "changes"),
    pairs(list(CASES), STATE_DTYPES, ({}, {"betas": (0.3, 0.4)}, {"weight_decay": 0.0})),
    ids=str,
)
def test_the_c_plus_plus_kernel_has_the_bits_of_torch(
    name: str, state_dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    """Where torch computes in vectors with fused multiply-adds; it has other code for a rest. Two stretches."""
    rule, options = CASES[name]
    weight, gradients = start_values(CHUNK_NUMEL + 3 * 1024)
    runs = [(weight.numel() // 48 * 16, options | changes), (weight.numel(), options | {"weight_decay": 0.0})]
    shards = [Shard(rule, options, weight, state_dtype, torch.bfloat16) for _ in range(2)]
    for step, gradient in enumerate(gradients[:3], start=1):
        for shard, tier in zip(shards, TIERS, strict=False):
            shard.update(tier, gradient, step, scale=0.5, runs=runs)
    assert_same_bits(*shards)


# -- scale, flag and steps -------------------------------------------------------------------------------------------


def stepped(tier: Backend, gradient: Tensor, scale: float | Tensor = 1.0, skip: Tensor | None = None) -> Shard:
    shard = Shard(*CASES["adamw"], start_values(1100)[0], torch.int8, torch.float16)
    assert shard.out is not None
    shard.out.zero_()
    shard.update(tier, gradient, 1, scale, skip=skip)
    return shard


@pytest.mark.parametrize("tier", TIERS)
def test_the_scale_may_be_a_tensor(tier: Backend) -> None:
    gradient = start_values(1100)[1][0]
    expected = stepped(tier, gradient, 0.3)
    for scale in (torch.tensor(0.3), torch.tensor([0.3]), torch.tensor([[0.3]], dtype=torch.float64)):
        assert_same_bits(stepped(tier, gradient, scale), expected)
    assert not torch.equal(stepped(tier, gradient).states["exp_avg"], expected.states["exp_avg"])


@pytest.mark.parametrize("tier", TIERS)
def test_a_flag_leaves_everything_as_it_is(tier: Backend) -> None:
    weight, (gradient, *_) = start_values(1100)
    untouched = Shard(*CASES["adamw"], weight, torch.int8, torch.float16)
    assert untouched.out is not None
    untouched.out.zero_()
    expected = stepped(tier, gradient)
    broken = gradient.clone()
    broken[5] = torch.nan
    for dtype in (torch.bool, torch.int32, torch.float32):
        assert_same_bits(stepped(tier, broken, skip=torch.ones(1, dtype=dtype)), untouched)
        assert_same_bits(stepped(tier, gradient, skip=torch.zeros((), dtype=dtype)), expected)


@pytest.mark.parametrize(("kind", "state_dtype", "tier"), pairs(list(CASES), STATE_DTYPES, TIERS), ids=str)
def test_step_0_leaves_a_stretch_as_it_is(
    kind: str, tier: Backend, state_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """And other stretches have the bits of their own step."""
    rule, options = CASES[kind]
    weight, first, gradient = (torch.randn(1000, generator=generator) for _ in range(3))
    shard, expected = (Shard(rule, options, weight, state_dtype) for _ in range(2))
    gradient[256:512] = 0
    for one in (shard, expected):
        one.update("reference", first, 1, 0.5)
    before = wide(shard)
    expected.update(tier, gradient, 7, 0.5)
    shard.update(tier, gradient, 7, 0.5, runs=[(256, options), (512, options), (1000, options)], steps=[7, 0, 7])
    for index, (found, old, wanted) in enumerate(zip(wide(shard), before, wide(expected), strict=True)):
        # A block whose largest value was rounded up to a power of two gets twice the scale: its smallest lose a bit.
        lost = 2.0**-16 * float(old.abs().max()) if state_dtype == torch.int8 and index else 0.0
        torch.testing.assert_close(found[256:512], old[256:512], rtol=0, atol=lost)
        assert torch.equal(found[:256], wanted[:256]) and torch.equal(found[512:], wanted[512:])


def wide(shard: Shard) -> list[Tensor]:
    """Copies of the values."""
    return [shard.master.clone(), *(state.widened().clone() for state in shard.stored)]


# -- which tier ------------------------------------------------------------------------------------------------------

Choose = Callable[[str], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Choose]:
    """`choose("torch")` sets the tier of this process until the test ends."""

    def to(tier: str) -> None:
        monkeypatch.setenv("LOWTIDE_CPU_KERNEL", tier)
        cpu_kernel.cache_clear()

    yield to
    cpu_kernel.cache_clear()


@needs_compiler
def test_the_log_names_the_kernel_once(choose: Choose, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    for tier in ("native", "portable", "torch"):
        choose(tier)
        trained("auto", "adamw", torch.float32, 100, 2)
    assert caplog.messages == [
        "CPU optimizer: a C++ pass per shard, with all instructions of this processor",
        "CPU optimizer: a C++ pass per shard, with portable instructions",
        "CPU optimizer: torch's kernels, chunk by chunk, because LOWTIDE_CPU_KERNEL is torch",
    ]


def test_an_unknown_tier_is_refused(choose: Choose) -> None:
    choose("fast")
    assert refusal(cpu_kernel) == "LOWTIDE_CPU_KERNEL: expected native, portable or torch, found 'fast'"


# -- errors ----------------------------------------------------------------------------------------------------------

MOMENTUM, SGD = CASES["sgd with momentum"], CASES["sgd"]
ONES = torch.ones(4)
GIVEN: dict[str, Any] = {"master": ONES, "gradient": ONES, "states": [ONES], "gradient_scale": 1.0, "out": None}
ONE_OF_CPU = "with a single element on cpu, the device of master, found"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"master": ONES.view(2, 2)}, "optimizer_step: expected floating-point master (n,), found (2, 2) torch"),
    ({"master": ONES.long()}, "master (n,), found (4,) torch.int64"),
    ({"gradient": torch.ones(5)}, "expected floating-point gradient (4,) like master, found (5,) torch.float32"),
    ({"out": ONES.int()}, "expected floating-point out (4,) like master, found (4,) torch.int32"),
    (
        {"states": [torch.ones(3)]},
        "expected state 0 (4,) like master, and the scale of an 8-bit state (1,); found (3,)",
    ),
    ({"states": [ONES.char(), torch.ones(2)]}, "found (4,), scale (2,)"),
    ({"gradient_scale": torch.ones(2)}, f"expected gradient_scale {ONE_OF_CPU} (2,) on cpu"),
    ({"skip": torch.ones(1, device="meta")}, f"expected skip {ONE_OF_CPU} (1,) on meta"),
]


def test_what_does_not_fit_is_refused() -> None:
    for change, text in REFUSED:
        given = {**GIVEN, **change}
        assert text in refusal(update_shard, MOMENTUM[0], step=1, options=MOMENTUM[1], **given)
    rule, options = SGD
    for ends in ((3,), (2, 5), (3, 2, 4)):
        text = refusal(update_runs, rule, ONES, ONES, [], 1, [(end, options) for end in ends], 1.0, None)
        assert text.startswith("optimizer_step: expected ends of runs that ascend to 4, found [")
    text = refusal(update_runs, rule, ONES, ONES, [], 1, [(4, options)], 1.0, None, steps=[1, 1])
    assert text == "optimizer_step: expected a step for each of 1 runs, found 2"


def test_every_optimizer_that_has_a_kernel_is_tested_here() -> None:
    assert {rule.name for rule, _ in CASES.values()} == {one.name for one in OPTIMIZERS.values() if one.coefficients}
