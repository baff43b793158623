"""Training is the same to the last bit, whether activations are offloaded or not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.engine.test_activation_checkpointing import RECOMPUTED, Noisy
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_alike, train_all

BUDGET = 17_000  # the logits have 16856 bytes, any other saved activation 1232 to 3696
GPT = Case(models.tiny_gpt, models.token_batch, steps=2)
SOCKETS = {"communication": {"transport": "sockets"}}


class Recurrent(nn.Module):
    """A model whose weights are used many times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCAB, 22)
        self.cell = nn.LSTMCell(22, 22)
        self.head = nn.Linear(22, models.VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        state = None
        outputs = []
        for x in self.embedding(ids).unbind(1):
            state = self.cell(x, state)
            outputs.append(self.head(state[0]))
        return nn.functional.cross_entropy(torch.stack(outputs, 1).flatten(0, 1), targets.flatten())


def offloaded(case: Case, folder: Path) -> Case:
    offload = {"device": "nvme", "nvme_path": str(folder), "min_bytes": 256, "budget_bytes": BUDGET}
    section = {**case.config.get("activation_checkpointing", {}), "offload": offload}
    return case.at(case.stage, config={"activation_checkpointing": section})


def test_models_of_all_kinds_train_the_same(ranks: RankPool, tmp_path: Path) -> None:
    """Stages, transports and precisions are asked in tests/laws."""
    kinds: list[Callable[[], nn.Module]] = [Noisy, RECOMPUTED[0], Recurrent, RECOMPUTED[2]]
    cases = [replace(GPT, build=build).at(3 - 3 * (n % 2), config=SOCKETS) for n, build in enumerate(kinds)]
    outcomes = ranks(2, train_all, [one for case in cases for one in (case, offloaded(case, tmp_path))])[0]
    for case, *both in zip(cases, outcomes[::2], outcomes[1::2], strict=True):
        assert_alike(both, case)
