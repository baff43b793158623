"""Adafactor is the published update at every stage and number of ranks, with rows and columns for second moments."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.checkpoint.files import CheckpointError
from tests.engine.test_optimizer_offload import offloaded
from tests.kit.models import short_gpt, short_gpt_float64, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, share_of, train_all, train_plainly
from tests.zero.test_without_masters import same_rows

PARAMS: dict[str, Any] = {"lr": 0.05, "eps": [1e-20, 1e-3], "weight_decay": 0.1}
CONFIG: dict[str, Any] = {"optimizer": {"type": "Adafactor", "params": PARAMS}}
CASE = Case(short_gpt_float64, token_batch, clip=0.5, config=CONFIG)
CASE_OF_FLOATS = Case(short_gpt, token_batch, config=CONFIG)
published = partial(torch.optim.Adafactor, lr=0.05, eps=(1e-20, 1e-3), weight_decay=0.1)


def paper(weight: Tensor, gradients: list[Tensor], most: float, scales: bool, is_relative: bool) -> Tensor:
    """arXiv 1804.04235, algorithms 4 (matrices) and 5 (vectors), with eps1 0; most: 0.01 there, of relative steps."""
    rows = columns = moments = torch.zeros(())
    for t, gradient in enumerate(gradients, start=1):
        beta = 1 - t**-0.8
        if gradient.dim() == 2:
            rows = beta * rows + (1 - beta) * gradient.square().sum(1)
            columns = beta * columns + (1 - beta) * gradient.square().sum(0)
            moments = rows[:, None] * columns[None] / rows.sum()
        else:
            moments = beta * moments + (1 - beta) * gradient.square()
        step = gradient / moments.sqrt()
        step = step / max(1.0, step.square().mean().sqrt().item())
        size = max(1e-3, weight.square().mean().sqrt().item()) if scales else 1.0
        weight = weight - size * (min(most, t**-0.5) if is_relative else most) * step
    return weight


@pytest.mark.parametrize("shape", [(7, 5), (11,)])
@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("is_relative", [True, False])
def test_it_is_the_papers_update(shape: tuple[int, ...], scales: bool, is_relative: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    params = {"lr": 0.6, "eps": [1e-30, 1e-3], "scale_parameter": scales, "relative_step": is_relative}
    config = {"steps_per_print": 0, "optimizer": {"type": "adafactor", "params": params}}
    with lowtide.initialize(Product(weight), config) as engine:
        for gradient in gradients:
            engine.train_step(gradient)
        expected = paper(weight, gradients, 0.6, scales, is_relative)
        torch.testing.assert_close(engine.full("weight"), expected, rtol=1e-12, atol=1e-13)


class Product(torch.nn.Module):
    """Whose gradient is what it is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_it_is_torchs_update(ranks: RankPool) -> None:
    expected = train_plainly(CASE, 2, published)
    for outcome in ranks(2, train_all, [CASE.at(stage) for stage in range(4)])[0]:
        assert_close(outcome, expected, 1e-7, 1e-7)


def go_on(case: Case, folder: Path, first: int, end: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        if first:
            engine.load_checkpoint(folder)
        for step in range(first, end):
            engine.train_step(share_of(case.global_batch(step, engine.data_size)))
        engine.save_checkpoint(folder)
        found = {name: engine.full(name) for name, _ in engine.named_parameters()}
        return {name: value for name, value in found.items() if engine.rank == 0}


def test_a_resume_on_other_ranks_goes_on_with_the_same_rows_and_columns(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(short_gpt, same_rows, config=CONFIG)
    expected = ranks(1, go_on, case.at(0), tmp_path / "whole", 0, 4)[0]
    ranks(4, go_on, case.at(3), tmp_path / "parts", 0, 2)
    ranks(2, go_on, offloaded(case.at(1), tmp_path), tmp_path / "parts", 2, 3)
    found = ranks(1, go_on, case.at(1), tmp_path / "parts", 3, 4)[0]
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_states_of_another_optimizer_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """SGD's, which has none."""
    ranks(1, go_on, Case(short_gpt, token_batch, config={"optimizer": {"type": "sgd"}}), tmp_path, 0, 1)
    words = r"it has the states of optimizer sgd \(none\), this run has optimizer adafactor"
    with pytest.raises(CheckpointError, match=words):
        go_on(CASE_OF_FLOATS, tmp_path, 1, 1)


def state_bytes() -> tuple[int, int]:
    """(bytes of states on this rank, elements of the model)."""
    config = Case(short_gpt, token_batch, config={"optimizer": {"type": "adafactor"}}).at(2).as_config()
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    with lowtide.initialize(torch.nn.Sequential(model, torch.nn.Flatten(0), Mean()), config) as engine:
        engine.train_step(torch.ones(2, 128))
        return engine.memory().optimizer_bytes, sum(param.numel() for param in model.parameters())


class Mean(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_states_are_below_a_byte_of_a_parameter_and_on_one_rank_each(ranks: RankPool) -> None:
    found = ranks(2, state_bytes)
    factors, vectors = 4 * (128 + 128) * 4, 4 * 128 * 4
    padding = 2 * 1024 * 4 * 4  # shards are whole blocks
    total = sum(nbytes for nbytes, _ in found)
    assert factors + vectors <= total <= factors + vectors + padding
