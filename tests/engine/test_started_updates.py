"""An update that is started before the host knows whether it counts gives the bits of one that waits for that."""

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.engine.step import step_update
from lowtide.engine.step.step_sums import Clipping, SummedStep
from lowtide.kernels.exact_sum import NUM_LIMBS, from_limbs, to_limbs, value_of
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, rank_and_world, train_all
from tests.zero.test_float16 import overflowing_batch


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


TWO_BLOCKS = partial(models.TinyGPT, layers=2)
CASES = [
    Case(TWO_BLOCKS, models.token_batch, 0, clip=0.3),
    Case(TWO_BLOCKS, models.token_batch, 3, clip=0.3, config={"bf16": {"enabled": True}}),
    Case(TWO_BLOCKS, models.token_batch, 2, accumulation=2),
    Case(TWO_BLOCKS, models.token_batch, 3, config={"zero_optimization": {"update_in_backward": True}}),
    *(
        Case(models.mlp, overflowing_batch, stage, config={"fp16": {"enabled": True, "initial_scale_power": 3}})
        for stage in (1, 3)
    ),
    *(
        Case(
            build,
            overflowing_batch,
            stage,
            clip=0.3,
            config={"fp16": {"enabled": True, "initial_scale_power": 3}, "communication": {"transport": transport}},
        )
        for build, stage, transport in (
            (LacksGradients, 1, "shared_memory"),
            (LacksGradients, 2, "sockets"),
            (LacksMore, 2, "sockets"),
        )
    ),
]


def train_both_ways(cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    """With the CPU taken for a device that the host would wait for."""
    plain = train_all(cases)
    with patch.object(step_update, "_is_waited_for", lambda device: True):
        return list(zip(plain, train_all(cases), strict=True))


def test_it_gives_the_same_bits(ranks: RankPool) -> None:
    for case, (plain, started) in zip(CASES, ranks(2, train_both_ways, CASES)[0], strict=True):
        told, expected = (str((one.losses, one.norms, one.scales, one.skipped)) for one in (started, plain))  # with NaN
        assert told == expected, case
        assert any(plain.skipped) == ("fp16" in case.config)
        assert [name for name in plain.state if not torch.equal(plain.state[name], started.state[name])] == [], case


class OfRank0(nn.Module):
    """The second layer gets a gradient on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return (self.sometimes(x) if dist.get_rank() == 0 else x).square().mean()


def overflow_where_one_rank_waits(stage: int) -> tuple[list[bool], int, Tensor]:
    config = {"optimizer": {"type": "adamw"}, "zero_optimization": {"stage": stage}, "steps_per_print": 0}
    config |= {"fp16": {"enabled": True, "initial_scale_power": 4}, "gradient_clipping": 0.1}
    config |= {"communication": {"transport": "native", "timeout_seconds": 20}}  # as of a device
    with patch.object(step_update, "_is_waited_for", lambda device: True):
        torch.manual_seed(0)
        engine = lowtide.initialize(OfRank0(), config)
        batches = [torch.full((2, 4), value) for value in (1.0, 60000.0, 1.0)]
        skipped = [engine.train_step((batch,)).skipped for batch in batches]
        value = engine.full("sometimes.weight")
        assert value is not None
        engine.close()
        return skipped, engine.optimizer.num_steps, value


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_that_has_to_wait_goes_with_one_that_does_not(ranks: RankPool, stage: int) -> None:
    (skipped, num_steps, value), other = ranks(2, overflow_where_one_rank_waits, stage)
    assert skipped == [False, True, False] == other[0]
    assert num_steps == 2 == other[1]
    assert torch.equal(value, other[2])


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-30, 0.3, 1e30, 1e300])
def test_a_sum_is_the_same_where_its_limbs_are(size: float) -> None:
    limbs = to_limbs(torch.arange(1000, dtype=torch.float64) / 1000 * size)
    assert value_of(limbs).item() == pytest.approx(from_limbs(limbs.tolist()), rel=1e-15, abs=0)


def test_a_sum_that_is_too_large_is_infinite() -> None:
    assert value_of(to_limbs(torch.full((9,), 1e308, dtype=torch.float64))).item() == math.inf


@pytest.mark.parametrize("norm", [0.0, 0.25, 0.2999999, 0.5, 2.0**100])
@pytest.mark.parametrize("clipping", [Clipping(0.3), Clipping(0.3, is_by_hand=True), Clipping(fixed=0.5), Clipping()])
def test_a_factor_is_the_same_where_its_norm_is(clipping: Clipping, norm: float) -> None:
    total = torch.zeros(2 * NUM_LIMBS + 5, dtype=torch.int64)
    total[:NUM_LIMBS] = to_limbs(torch.tensor([norm**2], dtype=torch.float64))
    factor, skip = SummedStep(total, 0, None, 1, 0).factor_and_skip(clipping, 0.5)
    assert factor.item() == pytest.approx(clipping.factor(norm / 2) / 2, rel=1e-15) and skip.item() == 0
