"""The optimizer step's scale and flag on the device, random rounding, idle stretches and errors, in every tier."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.optimizer_states import new_states, rounded_at_random, stored_states
from lowtide.kernels.optimizer_step import update_runs, update_shard
from tests.kernels.cpu_kernel import ADAM, CASES, STATE_DTYPES
from tests.kit.grids import pairs

BACKENDS: tuple[Backend, ...] = ("auto", "reference", "triton")
ADAMW = CASES["adamw"][0]


def step(
    backend: Backend, weight: Tensor, gradient: Tensor, scale: float | Tensor, skip: Tensor | None = None
) -> list[Tensor]:
    """Everything that the step writes."""
    master, out = weight.clone(), torch.zeros(weight.numel(), dtype=torch.float16)
    states = list(new_states(ADAMW, master, ADAM, torch.int8).values())
    update_shard(ADAMW, master, gradient.clone(), states, 1, ADAM, scale, out, skip=skip, backend=backend)
    return [master, out, *states]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_may_be_a_tensor(backend: Backend, generator: torch.Generator) -> None:
    weight, gradient = (torch.randn(1100, generator=generator) for _ in range(2))
    expected = step(backend, weight, gradient, 0.3)
    for scale in (torch.tensor(0.3), torch.tensor([0.3]), torch.tensor([[0.3]], dtype=torch.float64)):
        for found, wanted in zip(step(backend, weight, gradient, scale), expected, strict=True):
            assert torch.equal(found, wanted)
    assert not torch.equal(step(backend, weight, gradient, 1.0)[2], expected[2])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flag_leaves_everything_as_it_is(backend: Backend, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight, gradient = (torch.randn(1100, generator=generator) for _ in range(2))
    gradient[5] = torch.nan
    master, out, *states = step(backend, weight, gradient, 1.0, skip=torch.ones(1, dtype=dtype))
    assert torch.equal(master, weight) and not out.any()
    assert all(
        torch.equal(a, b) for a, b in zip(states, new_states(ADAMW, weight, ADAM, torch.int8).values(), strict=True)
    )
    gradient[5] = 1.0
    for found, expected in zip(
        step(backend, weight, gradient, 1.0, skip=torch.zeros((), dtype=dtype)),
        step(backend, weight, gradient, 1.0),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_the_mean_of_many_roundings_is_the_value(generator: torch.Generator) -> None:
    """A mean of 4000 has a deviation of at most half a step / sqrt(4000); six of them are allowed."""
    values = torch.randn(512, generator=generator) * 2.0 ** -torch.randint(0, 20, (512,), generator=generator)
    noise = torch.randint(-(2**31), 2**31, (4000, 512), generator=generator).to(torch.int32)
    rounded = torch.stack([rounded_at_random(values, one) for one in noise])
    assert torch.equal(rounded.bfloat16().float(), rounded)
    step = torch.finfo(torch.bfloat16).eps * values.double().abs()
    assert ((rounded.double() - values.double()).abs() <= step).all()
    error = (rounded.double().mean(0) - values.double()).abs()
    assert (error <= 6 * step / 2 / 4000**0.5).all()


def test_what_bfloat16_has_stays(generator: torch.Generator) -> None:
    sizes = 2.0 ** -torch.randint(0, 24, (5000,), generator=generator)
    values = (torch.randn(5000, generator=generator) * sizes).bfloat16().float()
    values[:4] = torch.tensor([0.0, torch.inf, -torch.inf, torch.finfo(torch.bfloat16).max])
    noise = torch.randint(-(2**31), 2**31, (5000,), generator=generator).to(torch.int32)
    assert torch.equal(rounded_at_random(values, noise), values)
    assert rounded_at_random(torch.tensor([torch.nan]), noise[:1]).isnan()


def test_tensors_that_do_not_fit_are_errors() -> None:
    (rule, options), ones = CASES["sgd with momentum"], torch.ones(4)

    def update(master: Tensor, gradient: Tensor, state: Tensor, out: Tensor | None = None) -> None:
        update_shard(rule, master, gradient, [state], 1, options, 1.0, out)

    with pytest.raises(
        ValueError, match=r"optimizer_step: expected floating-point master \(n,\), found \(2, 2\) torch"
    ):
        update(ones.view(2, 2), ones.view(2, 2), ones.view(2, 2))
    with pytest.raises(ValueError, match=r"master \(n,\), found \(4,\) torch.int64"):
        update(ones.long(), ones, ones)
    with pytest.raises(
        ValueError, match=r"expected floating-point gradient \(4,\) like master, found \(5,\) torch.float32"
    ):
        update(ones, torch.ones(5), ones)
    with pytest.raises(ValueError, match=r"expected floating-point out \(4,\) like master, found \(4,\) torch.int32"):
        update(ones, ones, ones, ones.int())
    with pytest.raises(ValueError, match=r"expected state 0 \(4,\) like master, .* \(1,\); found \(3,\), scale None"):
        update(ones, ones, torch.ones(3))
    with pytest.raises(ValueError, match=r"found \(4,\), scale \(2,\)"):
        update_shard(rule, ones, ones, [ones.to(torch.int8), torch.ones(2)], 1, options, 1.0, None)


def test_scalars_that_do_not_fit_are_errors() -> None:
    rule, options = CASES["sgd"]
    ones = torch.ones(4)
    expected = r"expected gradient_scale with a single element on cpu, the device of master, found \(2,\) on cpu"
    with pytest.raises(ValueError, match=expected):
        update_shard(rule, ones, ones, [], 1, options, torch.ones(2), None)
    expected = r"expected skip with a single element on cpu, the device of master, found \(1,\) on meta"
    with pytest.raises(ValueError, match=expected):
        update_shard(rule, ones, ones, [], 1, options, 1.0, None, skip=torch.ones(1, device="meta"))


@pytest.mark.parametrize("ends", [(3,), (2, 5), (3, 2, 4)])
def test_runs_must_end_at_the_shards_end(ends: tuple[int, ...]) -> None:
    rule, options = CASES["sgd"]
    runs = [(end, options) for end in ends]
    with pytest.raises(ValueError, match=r"optimizer_step: expected ends of runs that ascend to 4, found \["):
        update_runs(rule, torch.ones(4), torch.ones(4), [], 1, runs, 1.0, None)


@pytest.mark.parametrize(("kind", "state_dtype", "backend"), pairs(list(CASES), STATE_DTYPES, BACKENDS), ids=str)
def test_step_0_leaves_a_stretch_as_it_is(
    kind: str, backend: Backend, state_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """In every tier, and other stretches have the bits of their own step."""
    rule, options = CASES[kind]
    master, gradient = (torch.randn(1000, generator=generator) for _ in range(2))
    states = list(new_states(rule, master, options, state_dtype).values())
    update_runs(rule, master, gradient.clone(), states, 1, [(1000, options)], 0.5, None, backend="reference")
    gradient[256:512] = 0
    expected, others = master.clone(), [state.clone() for state in states]
    update_runs(rule, expected, gradient.clone(), others, 7, [(1000, options)], 0.5, None, backend=backend)
    before = wide(master, states)
    runs = [(256, options), (512, options), (1000, options)]
    update_runs(rule, master, gradient, states, 7, runs, 0.5, None, steps=[7, 0, 7], backend=backend)
    triples = zip(wide(master, states), before, wide(expected, others), strict=True)
    for index, (found, old, wanted) in enumerate(triples):
        # A block whose largest value was rounded up to a power of two gets twice the scale: its smallest lose a bit.
        lost = 2.0**-16 * float(old.abs().max()) if state_dtype == torch.int8 and index else 0.0
        torch.testing.assert_close(found[256:512], old[256:512], rtol=0, atol=lost)
        assert torch.equal(found[:256], wanted[:256]) and torch.equal(found[512:], wanted[512:])


def wide(master: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Copies of the values."""
    return [master.clone(), *(state.widened().clone() for state in stored_states(states))]


def test_as_many_steps_as_runs() -> None:
    rule, options = CASES["sgd"]
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="optimizer_step: expected a step for each of 1 runs, found 2"):
        update_runs(rule, ones, ones, [], 1, [(4, options)], 1.0, None, steps=[1, 1])
