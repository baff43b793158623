"""What the ranks of a tensor axis have in common: batches, vocabularies, optimizers, files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import assert_alike, refusal, train_all
from tests.parallel import models_of_others as others
from tests.parallel.trainings import PARTS, Mixer, case_of, dropping, mixed, split_config


class Between(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)) * self.scale)
        return result.square().mean()


def refusals() -> dict[str, str]:
    found = {}
    with lowtide.initialize(dropping(), split_config()) as engine:
        found["expected the same batch on the 2 ranks of tensor (ranks 0, 1), found different"] = refusal(
            engine.train_step, (mixed() * (1 + engine.rank),)
        )
    with lowtide.initialize(Between(), split_config()) as engine:
        found["equal gradients of the replicated 'scale' on 2 ranks, found different"] = refusal(
            engine.train_step, (mixed(),)
        )
    with lowtide.initialize(others.gpt2(), split_config()) as engine:
        for token in (-1, others.VOCAB):
            given = (torch.tensor([[1, token]]), torch.tensor([[1, 1]]))
            assert refusal(engine, *given, kind=IndexError) == "index out of range in self", "as torch says it"
    return found


def test_what_ranks_have_unlike_is_told(ranks: RankPool) -> None:
    for found in ranks(2, refusals):
        for text, told in found.items():
            assert text in told


def trained_later() -> list[float]:
    """The losses of a training whose last layer comes into the optimizer after the engine was made."""
    torch.manual_seed(0)
    config = split_config({"tensor": int(os.environ["WORLD_SIZE"])}) | {"optimizer": None}
    model = dropping().eval()
    with lowtide.initialize(model, config, optimizer=torch.optim.SGD(model.blocks[0].parameters(), lr=1e-6)) as engine:
        engine.optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 1e-6})
        return [engine.train_step((mixed(),)).loss.item() for _ in range(3)]


def test_groups_of_one_unit_come_to_the_optimizer_together(ranks: RankPool) -> None:
    assert ranks(2, trained_later)[0] == pytest.approx(ranks(1, trained_later)[0], rel=1e-5)


def test_offload_beside_a_split_gives_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """Without parts of the tokens it is asked in tests/laws."""
    file, case = {"device": "nvme", "nvme_path": str(tmp_path)}, case_of(others.llama, 3)
    states: dict[str, Any] = {"zero_optimization": {"offload_optimizer": file, "offload_param": file}}
    activations = {"activation_checkpointing": {"offload": {"device": "cpu", "min_bytes": 1}}}
    cases = [case.at(3, config=one) for one in (PARTS, PARTS | states | activations)]
    assert_alike(ranks(2, train_all, cases)[0])
