"""Operations on tensors without memory are not asked twice for their sizes; what is counted stays the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import flop_counter

import lowtide
from lowtide.engine.plan import tracker
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.profile import Profile
from lowtide.zero import plan
from lowtide.zero.plan import Dtypes, plan_units
from tests.kit import models


def profiles() -> list[Profile]:
    """Of a first run, of one with what that has found, and of one in which blocks are computed again."""
    model = models.tiny_gpt()
    run = MetaRun(model, plan_units(model), Dtypes(torch.bfloat16, None, None), "cuda")
    batch = models.token_batch(0, 2)
    return [run.profile(batch, 2, every) for every in (0, 0, 1)]


def test_what_is_remembered_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, recomputed = profiles()
    assert first == again
    monkeypatch.setattr(tracker, "_makes_new", lambda func: False)
    assert profiles() == [first, again, recomputed]


WIDTH, HEADS, ROWS, LENGTH = 32, 4, 2, 16


class Attention(nn.Module):
    """Its output is a loss."""

    def __init__(self, num_keys: int) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * num_keys * WIDTH // HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = (self.query(x), *self.keys(x).chunk(2, -1))
        query, key, value = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in projected)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.square().mean()


@pytest.fixture
def before_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas of torch 2.11, which refuse keys with fewer heads than queries."""
    for name, place in (("sdpa_flop_count", 0), ("sdpa_backward_flop_count", 1)):
        formula = getattr(flop_counter, name)

        def strict(*shapes: Any, place: int = place, formula: Any = formula) -> Any:
            assert shapes[place][1] == shapes[place + 1][1] == shapes[place + 2][1]
            return formula(*shapes)

        monkeypatch.setattr(flop_counter, name, strict)


@pytest.mark.usefixtures("before_2_12")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_queries_that_share_keys_take_the_operations_of_those_that_do_not(device: str) -> None:
    def attention(num_keys: int) -> list[Any]:
        model = Attention(num_keys)
        run = MetaRun(model, plan_units(model), Dtypes(torch.bfloat16, None, None), device, lambda loss, batch: loss)
        parts = run.profile(torch.zeros(1, LENGTH, WIDTH), ROWS, 0).parts.values()
        operations = [one for part in parts for one in part.forward_operations + part.backward_operations]
        return [one for one in operations if one.name.startswith("attention")]

    assert len(attention(HEADS)) == 2 and attention(1) == attention(2) == attention(HEADS)


@pytest.mark.usefixtures("before_2_12")
def test_a_profile_counts_attention() -> None:
    """On the CPU too, of whose kernel torch has no formula: 2 products forward, and 5 backward."""
    config = {"optimizer": {"type": "sgd"}, "steps_per_print": 0}
    with lowtide.initialize(Attention(2), config, loss_fn=lambda loss, batch: loss) as engine:
        profile = engine.profile()
        engine.train_step(torch.randn(ROWS, LENGTH, WIDTH))
    of_layers = 2 * 2 * 2 * ROWS * LENGTH * WIDTH**2  # two, of as many parameters: forward, and gradients of weights
    assert profile.flops_by_module[""] == of_layers + 7 * 2 * ROWS * LENGTH**2 * WIDTH


def test_large_ends_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a training, of every second block (tests/engine/test_activation_checkpointing.py)."""
    monkeypatch.setattr(plan, "_MIN_END_NUMEL", 1)
    model = models.tiny_gpt()
    run = MetaRun(model, plan_units(model), Dtypes(None, None, None), "cpu")
    parts = [*run.profile(models.token_batch(0, 2), 2, 2).parts.values()]
    assert [part.backward_flops > 2 * part.forward_flops for part in parts[2:-1]] == [True, False, True, False]


def test_inputs_of_gpt2s_linear_layers_are_kept_for_w_and_those_of_frozen_layers_are_not() -> None:
    """As `WeightGradients` puts gradients off: x and dy of 3 rows, in float32."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    layers = pytorch_utils.Conv1D(8, 5), nn.Linear(8, 5), nn.Linear(5, 2).requires_grad_(False)
    model = nn.Sequential(*layers)
    run = MetaRun(model, plan_units(model), Dtypes(None, None, None), "cpu", lambda output, batch: output.sum())
    found = run.profile((torch.ones(3, 5),), 3, 0)
    assert sum(part.linear_bytes for part in found.parts.values()) == 4 * 3 * (5 + 8 + 8 + 5)
