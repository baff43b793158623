"""A stage that returns other shapes for the same kind of batch is an error on all ranks, in that step."""

from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import refusal

TEXT = (
    "pipeline: stage 0 returned for microbatch 0 other shapes than for an earlier batch of the same shapes: "
    "expected [(1, 4) torch.float32] for 1 arguments of 'blocks.2' at [0], found [(1, 2, 4) torch.float32] for 1"
)


class Widens(nn.Linear):
    is_wide = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(super().forward(x))
        return x.unsqueeze(1).expand(-1, 2, -1) if Widens.is_wide and x.dim() == 2 else x


def train_on_other_shapes(configs: list[dict[str, Any]]) -> list[str]:
    found = []
    for config in configs:
        torch.manual_seed(0)
        config = {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2, "optimizer": {"type": "sgd"}, **config}
        engine = lowtide.initialize(models.Chain(*(Widens(4, 4) for _ in range(4))), config)
        for act, rows in ((engine.train_step, 2), (engine.eval_step, 1)):
            Widens.is_wide = False
            act(torch.ones(rows, 4))
            before = engine.state_dict()
            Widens.is_wide = True
            found.append(refusal(act, torch.ones(rows, 4)))
            assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        Widens.is_wide = False
        assert not engine.train_step(torch.ones(2, 4)).skipped
        engine.close()
    return found


def configs_of(*schedules: str, **config: Any) -> list[dict[str, Any]]:
    return [{"pipeline": {"schedule": schedule}, **config} for schedule in schedules]


def check(found: list[list[str]]) -> None:
    for texts in found:
        assert [text.replace(" without gradient", "").startswith(TEXT) for text in texts] == [True] * len(texts), texts


def test_hosts_and_data_parallel_ranks_are_told(ranks: RankPool) -> None:
    check(ranks(2, train_on_other_shapes, configs_of("1f1b", "zb-h1")))
    check(ranks(4, train_on_other_shapes, configs_of("gpipe", zero_optimization={"stage": 3})))
