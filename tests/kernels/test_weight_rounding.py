"""Weights in bfloat16 without masters: what is drawn is unbiased and by number. All tiers round alike, masters too.

Triton's interpreter has no fused multiply-add: coefficients and gradients are powers of two where bits are compared, so
that they are those of any order of rounding.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.optimizer_states import new_states
from lowtide.kernels.optimizer_step import update_runs, update_shard
from lowtide.kernels.weight_rounding import Rounding, rounded_weights, split_weights, with_remainder
from lowtide.optimizers import OPTIMIZERS
from tests.kernels.cpu_kernel import ADAM, CASES, STATE_DTYPES, assert_same, bits, needs_compiler
from tests.kit.grids import pairs

CPU = torch.device("cpu")
NUM_DRAWS = 10_000
SGD: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
FORMS = ["drawn", "with a remainder", "split"]
MASTERS = {"float32": torch.float32, "float16": torch.float16}  # the interpreter truncates bfloat16
EXACT: dict[str, Any] = {
    "lr": 0.125, "betas": (0.5, 0.75), "weight_decay": 0.25, "momentum": 0.5, "dampening": 0.5,
}  # fmt: skip


@functools.cache
def draws(kind: str, seed: int = 3) -> Tensor:
    """NUM_DRAWS words of random bits, of successive elements or of successive steps of four."""
    rounding = Rounding.of(seed, "unit blocks.0 (bfloat16)", 1024)
    if kind == "elements":
        return rounding.noise(NUM_DRAWS, 1, CPU)
    return torch.cat([rounding.noise(4, step, CPU) for step in range(1, NUM_DRAWS // 4 + 1)])


@pytest.mark.parametrize("kind", ["elements", "steps"])
@pytest.mark.parametrize("part", [0.03, 0.5, 0.9])
def test_a_draw_is_one_of_two_neighbours_and_right_in_the_mean(kind: str, part: float) -> None:
    low, high = 1.0, 1.0 + 2.0**-7
    value = low + part * (high - low)
    found = rounded_weights(torch.full((NUM_DRAWS,), value), draws(kind))
    assert set(found.tolist()) == {low, high}
    deviation = (part * (1 - part) / NUM_DRAWS) ** 0.5
    assert abs((float((found == high).double().mean()) - part) / deviation) < 4.5


@pytest.mark.parametrize("kind", ["elements", "steps"])
def test_each_bit_is_set_half_of_the_time_and_says_nothing_of_the_next_word(kind: str) -> None:
    drawn = draws(kind)
    words = torch.stack([drawn >> bit & 1 for bit in range(32)]).double() * 2 - 1
    bound = 5.0 * NUM_DRAWS**-0.5  # of a mean of so many independent signs; 32 x 32 of them are looked at
    assert words.mean(1).abs().max() < bound
    assert (words[:, :-1] @ words[:, 1:].T / NUM_DRAWS).abs().max() < bound
    assert (words @ words.T / NUM_DRAWS).fill_diagonal_(0).abs().max() < bound


def test_bits_are_of_the_number_the_step_and_the_seed_alone() -> None:
    first = 2**32 - 500  # the upper word of the number changes on the way
    whole = Rounding(7, first).noise(1000, 3, CPU)
    parts = [Rounding(7, first).at(low).noise(high - low, 3, CPU) for low, high in ((0, 300), (300, 500), (500, 1000))]
    assert torch.equal(torch.cat(parts), whole)
    wrapped = Rounding(7, 2**64 - 500).noise(1000, 3, CPU)
    assert torch.equal(wrapped[500:], Rounding(7, 0).noise(500, 3, CPU))
    for other in (Rounding(8, first).noise(1000, 3, CPU), Rounding(7, first).noise(1000, 4, CPU), wrapped):
        assert int((other == whole).sum()) <= 1


@pytest.mark.parametrize("values", [[0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf]])
def test_what_bfloat16_has_stays_as_it_is(values: list[float]) -> None:
    given = torch.tensor(values * 100)
    assert torch.equal(bits(rounded_weights(given, draws("elements")[: given.numel()])), bits(given))
    assert rounded_weights(torch.tensor([torch.nan]), draws("elements")[:1]).isnan().all()


def remainder_of(form: str, master: Tensor) -> Tensor | None:
    dtypes = {"with a remainder": torch.bfloat16, "split": torch.int8}
    return torch.zeros_like(master, dtype=dtypes[form]) if form in dtypes else None


def steps_of(
    form: str, name: str, state_dtype: torch.dtype, weight: Tensor, gradients: list[Tensor], backend: Backend
) -> list[Tensor]:
    """What steps write, in three stretches with options of their own."""
    rule, options = CASES[name]
    options = options | {key: value for key, value in EXACT.items() if options.get(key)}
    if name in ("adam", "adagrad"):  # they square the gradient after weights were added to it
        options["weight_decay"] = 0.0
    runs = [(1030, options), (1040, options | {"weight_decay": 0.0}), (len(weight), options | {"lr": 0.25})]
    master = weight.to(MASTERS.get(form, torch.bfloat16), copy=True)
    out = torch.full_like(master, torch.nan, dtype=torch.float16) if form in MASTERS else None
    rounding = Rounding(5, 2**32 - 700) if form in ("drawn", "split") else None
    remainder = remainder_of(form, master)
    states = list(new_states(rule, master, options, state_dtype).values())
    for step, gradient in enumerate(gradients, start=1):
        update_runs(
            rule, master, gradient.clone(), states, step, runs, 0.5, out,
            rounding=rounding, remainder=remainder, backend=backend,
        )  # fmt: skip
    return [one for one in (master, out, remainder, *states) if one is not None]


def powers_of_two(numel: int, generator: torch.Generator) -> Tensor:
    exponents = torch.randint(-8, 4, (numel,), generator=generator)
    return torch.randn(numel, generator=generator).sign() * 2.0**exponents


@needs_compiler
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch has another order of operations"
)
@pytest.mark.parametrize(("name", "form", "state_dtype"), pairs(list(CASES), [*MASTERS, *FORMS], STATE_DTYPES), ids=str)
def test_the_kernels_have_the_bits_of_the_reference(
    name: str, form: str, state_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """A tile, and a rest that is no block; and no vector, but for masters, for which torch has other code then."""
    numel = 1216 if form in MASTERS else 1219
    weight = torch.randn(numel, generator=generator)
    gradients = [powers_of_two(numel, generator) for _ in range(2)]
    expected = steps_of(form, name, state_dtype, weight, gradients, "reference")
    backends: tuple[Backend, ...] = ("auto", "triton")
    for backend in backends:
        assert_same(steps_of(form, name, state_dtype, weight, gradients, backend), expected)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_small_updates_are_lost_to_the_nearest_and_not_otherwise(backend: Any) -> None:
    """1 + 400 x 2^-12: an update is a 32nd of the distance between neighbours."""
    masters = {}
    for form in ("nearest", *FORMS):
        master = torch.ones(4096, dtype=torch.bfloat16)
        remainder = remainder_of(form, master)
        for step in range(1, 401):
            update_shard(
                OPTIMIZERS["sgd"], master, torch.full((4096,), -(2.0**-12)), [], step, SGD, 1.0, None,
                rounding=Rounding(0, 0) if form in ("drawn", "split") else None, remainder=remainder, backend=backend,
            )  # fmt: skip
        masters[form] = (master if remainder is None else with_remainder(master, remainder)).double()
    exact = 1 + 400 * 2.0**-12
    assert torch.equal(masters["nearest"], torch.ones(4096).double())
    # A draw's variance is below a 32nd of the square of the distance; 400 of them, of 4096 elements.
    deviation = 2.0**-7 * (400 / 32 / 4096) ** 0.5
    assert abs(float(masters["drawn"].mean()) - exact) < 4.5 * deviation
    assert masters["drawn"].std() > 2.0**-7
    for form in ("with a remainder", "split"):  # both have the bits for each of the sums
        assert torch.equal(masters[form], torch.full((4096,), exact).double())


def test_what_is_not_used_keeps_weight_and_remainder() -> None:
    """Also where the two stand for a number half way between two values, which has another form too."""
    rule, options = OPTIMIZERS["adamw"], ADAM
    master = torch.tensor([1.0078125, 1.0, 3.0]).bfloat16()
    remainder = torch.tensor([2.0**-8, -(2.0**-9), 2.0**-20]).bfloat16()
    for backend in ("auto", "reference"):
        found, rest = master.clone(), remainder.clone()
        states = list(new_states(rule, master, options).values())
        update_runs(
            rule, found, torch.zeros(3), states, 4, [(3, options)], 1.0, None, steps=[0], remainder=rest,
            backend=backend,
        )  # fmt: skip
        assert_same([found, rest], [master, remainder])


def test_a_split_weight_is_the_nearest_bfloat16_and_what_24_bits_have_beside(generator: torch.Generator) -> None:
    words = torch.randint(-(2**31), 2**31, (NUM_DRAWS,), generator=generator, dtype=torch.int64).int()
    values = torch.where(words.view(torch.float32).isfinite(), words, 0).view(torch.float32)
    exact = (values.view(torch.int32) & ~0xFF).view(torch.float32)
    for given in (exact, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.00390625, -3.4e38]).repeat(100)):
        given = (given.view(torch.int32) & ~0xFF).view(torch.float32)
        nearest, rest = split_weights(given, draws("elements")[: given.numel()])
        assert torch.equal(bits(with_remainder(nearest, rest)), bits(given))  # whatever is drawn
        is_tie = rest == -128
        assert torch.equal(nearest[~is_tie], given.bfloat16()[~is_tie])
    nearest, rest = split_weights(torch.tensor([torch.nan, -torch.nan]), draws("elements")[:2])
    assert nearest.isnan().all() and not rest.any()


@pytest.mark.parametrize("kind", ["elements", "steps"])
def test_what_24_bits_lack_is_right_in_the_mean(kind: str) -> None:
    part, step = 0.3046875, 2.0**-15  # 78 of 256
    value = torch.full((NUM_DRAWS,), 1.0 + 5 * step + part * step)
    found = with_remainder(*split_weights(value, draws(kind)))
    assert set(found.tolist()) == {1.0 + 5 * step, 1.0 + 6 * step}
    deviation = (part * (1 - part) / NUM_DRAWS) ** 0.5
    assert abs((float((found == 1.0 + 6 * step).double().mean()) - part) / deviation) < 4.5


@pytest.mark.parametrize(
    ("rounding", "remainder"), [(Rounding(0, 0), torch.zeros(8).bfloat16()), (None, torch.zeros(8).char())]
)
def test_a_remainder_of_another_form_is_refused(rounding: Rounding | None, remainder: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected remainder \(8,\) torch\..* like master, found \(8,\) torch\."):
        update_shard(
            OPTIMIZERS["sgd"], torch.zeros(8).bfloat16(), torch.zeros(8), [], 1, SGD, 1.0, None,
            rounding=rounding, remainder=remainder,
        )  # fmt: skip
