"""The Triton optimizer step rounds as torch's tier does, bit for bit, and an element's bits depend on it alone.

Triton's interpreter has no fused multiply-add, so bits are compared where every product is exact: coefficients and
gradients are powers of two, and bits are then those of any order of rounding.
"""

from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import update_runs, update_shard
from tests.kernels.cpu_kernel import CASES, STATE_DTYPES, bits
from tests.kit.grids import pairs

NUMEL = 1216  # whole vectors of torch's kernels; a tile, and a rest that is no block
EXACT: dict[str, Any] = {
    "lr": 0.125, "betas": (0.5, 0.75), "weight_decay": 0.25, "momentum": 0.5, "dampening": 0.5,
}  # fmt: skip
MOMENTUM = {"momentum": 1.0, "dampening": 0.0, "nesterov": False, "lr": 0.0, "weight_decay": 0.0}


def powers_of_two(numel: int, low: int, high: int, generator: torch.Generator) -> Tensor:
    exponents = torch.randint(low, high, (numel,), generator=generator)
    return torch.randn(numel, generator=generator).sign() * 2.0**exponents


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        different = bits(one) != bits(other)
        assert not different.any(), f"tensor {index}: {int(different.sum())} of {different.numel()} elements differ"


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch has another order of operations"
)
@pytest.mark.parametrize(
    ("name", "state_dtype", "master_dtype"), pairs(list(CASES), STATE_DTYPES, (torch.float32, torch.float16)), ids=str
)  # the interpreter truncates bfloat16
def test_bits_are_those_of_torch(
    name: str, state_dtype: torch.dtype, master_dtype: torch.dtype, generator: torch.Generator
) -> None:
    rule, options = CASES[name]
    options = options | {key: value for key, value in EXACT.items() if options.get(key)}
    if name in ("adam", "adagrad"):  # they square the gradient after weights were added to it
        options["weight_decay"] = 0.0
    weight = torch.randn(NUMEL, generator=generator).to(master_dtype)
    gradients = [powers_of_two(NUMEL, -8, 4, generator) for _ in range(2)]
    runs = [(1030, options), (1040, options | {"weight_decay": 0.0}), (NUMEL, options | {"lr": 0.25})]
    results = []
    for backend in ("triton", "reference"):
        master, out = weight.clone(), torch.full((NUMEL,), torch.nan, dtype=torch.float16)
        states = list(new_states(rule, master, options, state_dtype).values())
        for step, gradient in enumerate(gradients, start=1):
            update_runs(rule, master, gradient.clone(), states, step, runs, 0.5, out, backend=backend)
        results.append([master, out, *states])
    assert_same(*results)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["sgd with momentum", "adagrad"])
def test_states_of_any_size_are_rounded_alike(name: str, state_dtype: torch.dtype, generator: torch.Generator) -> None:
    """Denormal values, values that are too large, and ones that are not finite; each in blocks with others."""
    rule, options = CASES[name]
    options = options | (MOMENTUM if name != "adagrad" else {"weight_decay": 0.0, "initial_accumulator_value": 0.0})
    gradient = torch.randn(8 * 256, generator=generator).view(8, 256)
    decades = torch.tensor([0, 3, 10, 18, -18, -30, -38, -44]).view(8, 1)
    gradient *= 10.0 ** (decades * torch.rand(8, 256, generator=generator))
    gradient[1, 7], gradient[2, 8], gradient[3, 9] = torch.inf, torch.nan, 2.0**126
    gradient[gradient == 0.0] = 1.0  # -0 may become 0
    gradient[0, :200] = 0.0
    weight = torch.randn(gradient.numel(), generator=generator)
    results = []
    for backend in ("triton", "reference"):
        states = list(new_states(rule, weight, options, state_dtype).values())
        with numpy.errstate(all="ignore"):  # Triton's interpreter computes with numpy
            update_shard(rule, weight.clone(), gradient.flatten(), states, 1, options, 1.0, None, backend=backend)
        results.append(states)
    found, expected = ([state.widened() for state in stored_states(states)] for states in results)
    assert expected[0].isnan().any() and expected[0].isfinite().any()
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert_same([found[0].nan_to_num(0.0)], [expected[0].nan_to_num(0.0)])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_where_a_shard_is_cut(state_dtype: torch.dtype, generator: torch.Generator) -> None:
    rule, options = CASES["adamw"]
    weight, gradient = (torch.randn(3000, generator=generator) for _ in range(2))
    shards = []
    for cuts in ((0, 3000), (0, 256, 1536, 3000)):
        master, out = weight.clone(), torch.full((3000,), torch.nan, dtype=torch.bfloat16)
        states = stored_states(list(new_states(rule, master, options, state_dtype).values()))
        for step in (1, 2):
            for start, end in pairwise(cuts):
                parts = [state.part(start, end) for state in states]
                tensors = [t for part in parts for t in (part.payload, part.scale) if t is not None]
                update_shard(
                    rule, master[start:end], gradient[start:end], tensors, step, options, 1 / 3, out[start:end],
                    backend="triton",
                )  # fmt: skip
        shards.append([master, out, *(state.widened() for state in states)])
    assert_same(*shards)
