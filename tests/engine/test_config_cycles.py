"""DeepSpeed's settings that change the numbers of a training: cycles, sums of gradients, autocast."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, train_all, train_plainly

CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_min_mom": 0.7}
BETAS = [(0.7, 0.99), (0.8, 0.99), (0.7, 0.99), (0.8, 0.99), (0.9, 0.99)]  # as DeepSpeed 0.19.8 sets them
RATES = [0.01, 0.055, 0.1, 0.055, 0.01]
SUM = {"gradient_allreduce_op": "sum", "optimizer": {"type": "sgd", "params": {"lr": 0.01}}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


class CycledAdamW(torch.optim.AdamW):
    """AdamW whose options are those of DeepSpeed's OneCycle."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, weight_decay=0.1)
        self._options = iter(zip(RATES, BETAS, strict=True))

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"], self.param_groups[0]["betas"] = next(self._options)
        return super().step(closure)


def summed_sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """On gradients that are added up over two ranks."""
    return torch.optim.SGD(params, lr=2 * 0.01)


class Autocast(models.TinyGPT):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, targets)


def test_a_cycle_moves_rate_and_betas(ranks: RankPool) -> None:
    scheduler = {"type": "OneCycle", "params": CYCLE}
    config = {"scheduler": scheduler, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}
    case = Case(models.mlp_float64, models.vector_batch_float64, steps=5, config=config)
    outcomes = ranks(2, train_all, [case.at(0), case.at(3)])[0]
    expected = train_plainly(case, 2, CycledAdamW)
    for outcome in outcomes:
        assert outcome.lrs == pytest.approx(RATES)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(outcome.state, expected.state, rtol=1e-9, atol=1e-12)


def test_gradients_are_added_up_over_ranks(ranks: RankPool) -> None:
    case = Case(models.mlp_float64, models.vector_batch_float64, steps=3, config=SUM)
    prescaled, accumulated = case.at(3, config={"prescale_gradients": True}), case.at(2, accumulation=2)
    *outcomes, last = ranks(2, train_all, [case, prescaled, accumulated])[0]
    expected = train_plainly(case, 2, summed_sgd)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(outcome.norms, [2 * norm for norm in expected.norms], rtol=1e-9, atol=0)
    again = train_plainly(accumulated, 2, summed_sgd)
    torch.testing.assert_close(last.losses, again.losses, rtol=1e-9, atol=0)


def test_autocast_is_torchs_around_each_forward(ranks: RankPool) -> None:
    case = Case(models.tiny_gpt, models.token_batch, steps=3, config=AUTOCAST)
    recomputed = case.at(3, config={"activation_checkpointing": {"every": 1}})
    outcomes = ranks(2, train_all, [case, recomputed])[0]
    expected = train_plainly(case.at(0, build=Autocast), 2)
    assert all(outcome.differences(outcomes[0]) == [] for outcome in outcomes)
    torch.testing.assert_close(outcomes[0].losses, expected.losses, rtol=2e-3, atol=0)
    assert outcomes[0].losses != train_plainly(case, 2).losses
