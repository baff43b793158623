"""An update that is started before the host knows whether it counts gives the bits of one that waits for that."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lowtide.engine.step import step_update
from lowtide.engine.step.step_sums import Clipping, SummedStep
from lowtide.kernels.exact_sum import NUM_LIMBS, to_limbs
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, differences, rank_and_world, start, train_all
from tests.zero.test_float16 import overflowing_batch

WAITED_FOR = patch.object(step_update, "_is_waited_for", lambda device: True)  # the CPU is taken for such a device


class LacksGradients(models.Mlp):
    """A layer is not used on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        rank, world_size = rank_and_world()
        return nn.functional.mse_loss(self.last(self.layers(self.own(x) if rank < world_size - 1 else x)), y)


class LacksMore(LacksGradients):
    """Another layer is used on none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(7, 7)


def overflowing(build: Any, stage: int, transport: str = "auto") -> Case:
    config = {"fp16": {"enabled": True, "initial_scale_power": 3}, "communication": {"transport": transport}}
    return Case(build, overflowing_batch, stage, clip=0.3 if build is not models.mlp else 0.0, config=config)


GPT = Case(partial(models.TinyGPT, layers=2), models.token_batch)
CASES = [
    GPT.at(0, clip=0.3),
    GPT.at(3, clip=0.3, config={"bf16": {"enabled": True}}),
    GPT.at(2, accumulation=2),
    GPT.at(3, config={"zero_optimization": {"update_in_backward": True}}),
    overflowing(models.mlp, 1),
    overflowing(models.mlp, 3),
    overflowing(LacksGradients, 1, "shared_memory"),
    overflowing(LacksGradients, 2, "sockets"),
    overflowing(LacksMore, 2, "sockets"),
]


def train_both_ways() -> list[tuple[Outcome, Outcome]]:
    plain = train_all(CASES)
    with WAITED_FOR:
        return list(zip(plain, train_all(CASES), strict=True))


def test_it_gives_the_same_bits(ranks: RankPool) -> None:
    for case, (plain, started) in zip(CASES, ranks(2, train_both_ways)[0], strict=True):
        told, expected = (str((one.losses, one.norms, one.scales, one.skipped)) for one in (started, plain))  # with NaN
        assert told == expected, case
        assert any(plain.skipped) == ("fp16" in case.config)
        assert differences(plain.state, started.state) == [], case


class OfRank0(nn.Module):
    """The second layer gets a gradient on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return (self.sometimes(x) if rank_and_world()[0] == 0 else x).square().mean()


def overflow_where_one_rank_waits(stage: int) -> tuple[list[bool], int, Tensor]:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "communication": {"transport": "native", "timeout_seconds": 20},  # as of a device
    }
    with WAITED_FOR, start(Case(OfRank0, models.vector_batch, stage, clip=0.1, config=config)) as engine:
        batches = [torch.full((2, 4), value) for value in (1.0, 60000.0, 1.0)]
        skipped = [engine.train_step((batch,)).skipped for batch in batches]
        return skipped, engine.optimizer.num_steps, engine.full("sometimes.weight")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_that_has_to_wait_goes_with_one_that_does_not(ranks: RankPool, stage: int) -> None:
    (skipped, num_steps, value), other = ranks(2, overflow_where_one_rank_waits, stage)
    assert (skipped, num_steps) == ([False, True, False], 2) == other[:2]
    assert torch.equal(value, other[2])


@pytest.mark.parametrize("norm", [0.0, 0.25, 0.2999999, 0.5, 2.0**100])
@pytest.mark.parametrize("clipping", [Clipping(0.3), Clipping(0.3, is_by_hand=True), Clipping(fixed=0.5), Clipping()])
def test_a_factor_is_the_same_where_its_norm_is(clipping: Clipping, norm: float) -> None:
    total = torch.zeros(2 * NUM_LIMBS + 5, dtype=torch.int64)
    total[:NUM_LIMBS] = to_limbs(torch.tensor([norm**2], dtype=torch.float64))
    factor, skip = SummedStep(total, 0, None, 1, 0).factor_and_skip(clipping, 0.5)
    assert factor.item() == pytest.approx(clipping.factor(norm / 2) / 2, rel=1e-15) and skip.item() == 0
