"""Stretches of a shard that have made another number of steps than others, and those that nobody used."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import update_runs
from tests.kernels.cpu_kernel import CASES, STATE_DTYPES
from tests.kit.grids import pairs

BACKENDS: tuple[Backend, ...] = ("auto", "reference", "triton")


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
