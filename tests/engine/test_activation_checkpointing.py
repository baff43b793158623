"""Recomputing activations changes no bit. Moved ones keep to their budget."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.offload import ActivationOffload
from lowtide.zero import plan
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, assert_alike, settings, train_all


class NoisyBlock(models.Block):
    """Its dropout must draw the same numbers again."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Noisy(models.TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock(22) for _ in range(3))


@on_ranks(2)
def test_dropout_draws_the_same_in_blocks_that_are_recomputed() -> None:
    """Every block at one stage, every second one at the other."""
    case = Case(Noisy, models.token_batch, steps=2)
    pairs = [(3, 0), (3, 1), (0, 2)]
    cases = [case.at(stage, config={"activation_checkpointing": {"every": every}}) for stage, every in pairs]
    assert_alike(train_all(cases))


class Counting(nn.Module):
    """Changes its buffers in each forward: in place, by another one, through `.data`, and as only BatchNorm does."""

    count: Tensor
    mean: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 7))
        self.norm = nn.BatchNorm1d(7)
        for name in ("count", "mean", "codes"):
            self.register_buffer(name, torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.codes.data.mul_(0.9).add_(x.detach()[0])
        return torch.tanh(self.norm(self.linear(x)) * self.mean + self.codes * self.count)


def test_recomputed_blocks_change_their_buffers_once() -> None:
    """Also where a graph is kept, and its blocks are recomputed twice."""
    states = []
    for every in (0, 1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(Counting() for _ in range(3)))
        with lowtide.initialize(model, settings(activation_checkpointing={"every": every})) as engine:
            for _ in range(2):
                loss = engine(torch.randn(5, 7)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                engine.step()
            states.append(engine.state_dict())
    assert states[0]["2.count"].tolist() == [3.0] * 7
    for state in states[1:]:
        assert [name for name, value in states[0].items() if not torch.equal(value, state[name])] == []


def test_large_ends_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MIN_END_NUMEL", 1)
    calls = Counter[str]()
    names = ("embedding", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "head")
    with lowtide.initialize(models.tiny_gpt(), settings(activation_checkpointing={"every": 2})) as engine:
        for name in names:
            engine.module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        engine.train_step(models.token_batch(0, 2))
    assert [calls[name] for name in names] == [1, 2, 1, 2, 1]


def test_the_peak_stays_under_the_budget(tmp_path: Path) -> None:
    budget = 256 << 10
    saved = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1024, "budget_bytes": budget}
    config = settings(3, train_micro_batch_size_per_gpu=8, activation_checkpointing={"offload": saved})
    with lowtide.initialize(models.TinyGPT(width=64, layers=8), config) as engine:
        for step in range(3):
            engine.train_step(models.token_batch(step, 8))
        offload = engine._parts.activations
        assert isinstance(offload, ActivationOffload)
        assert 0 < offload.residency.peak_resident_bytes <= budget and offload.residency.offloaded_bytes > 4 * budget
