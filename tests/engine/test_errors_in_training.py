"""After an error in a step training goes on as if the step had not been; a NaN is named with parameter and rank."""

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engine.step.step_sums import NonFiniteGradientError
from lowtide.zero.gradient_reducer import GradientStats
from tests.kit.models import linear_chain
from tests.kit.ranks import RankPool
from tests.kit.training import differences, settings

STAGES = (0, 1, 2, 3)


def engine_with_fault(stage: int, transport: str, value: float, step: int, rank: int, **more: Any) -> lowtide.Engine:
    """An engine whose gradient of blocks.1.weight has `value` at one place, in that step on that rank."""
    torch.manual_seed(0)
    model = linear_chain(40, 3)
    optimizer = {"type": "sgd", "params": {"lr": 0.1}}
    more |= {"gradient_clipping": 1.0, "optimizer": optimizer, "communication": {"transport": transport}}
    engine = lowtide.initialize(model, settings(stage, **more))

    def spoil(gradient: Tensor) -> Tensor | None:
        if engine.global_step != step or engine.rank != rank:
            return None
        spoiled = gradient.clone()
        spoiled[39, 7] = value
        return spoiled

    model.get_parameter("blocks.1.weight").register_hook(spoil)
    return engine


def errors(transport: str, rank: int) -> list[tuple[str, list[str]]]:
    """For each stage: the error of step 2, and which parameters have changed in it."""
    found = []
    for stage in STAGES:
        with engine_with_fault(stage, transport, (torch.nan, torch.inf)[(stage + rank) % 2], 2, rank) as engine:
            x = torch.randn(2, 40)
            for _ in range(2):
                engine.train_step((x,))
            before = engine.state_dict()
            with pytest.raises(NonFiniteGradientError) as caught:
                engine.train_step((x,))
            found.append((str(caught.value), differences(before, engine.state_dict())))
    return found


@pytest.mark.parametrize(
    ("transport", "world_size", "rank"),
    [("sockets", 1, 0), ("sockets", 2, 1), ("shared_memory", 3, 2), ("native", 2, 1)],
)
def test_a_nan_is_named_with_parameter_rank_and_step(
    ranks: RankPool, transport: str, world_size: int, rank: int
) -> None:
    """By the native transport only the sum is seen, and so no rank is named."""
    producer = "the sum over ranks" if transport == "native" else f"rank {rank}"
    told = (
        "step 2: expected finite gradients, found a NaN or infinite value in the gradient of 'blocks.1.weight' on "
        f"{producer}. No parameter was updated."
    )
    for found in ranks(world_size, errors, transport, rank):
        assert [(text.startswith(told), names) for text, names in found] == [(True, [])] * len(STAGES)


def skips(transport: str) -> list[tuple[list[bool], list[float], bool]]:
    """For each stage, of three steps with an overflow in the second: skipped, loss scale, and nothing changed in it."""
    found = []
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    for stage in STAGES:
        rank = torch.distributed.get_world_size() - 1
        with engine_with_fault(stage, transport, torch.inf, 1, rank, fp16=fp16) as engine:
            results, states = [], [engine.state_dict()]
            for _ in range(3):
                results.append(engine.train_step((torch.randn(2, 40),)))
                states.append(engine.state_dict())
            has_changed = [bool(differences(a, b)) for a, b in pairwise(states)]
            as_expected = engine.rank != 0 or has_changed == [True, False, True]
            found.append(([r.skipped for r in results], [r.loss_scale for r in results], as_expected))
    return found


@pytest.mark.parametrize(("transport", "world_size"), [("sockets", 1), ("shared_memory", 2)])
def test_float16_skips_the_step_on_every_rank_and_halves_the_scale(
    ranks: RankPool, transport: str, world_size: int
) -> None:
    for found in ranks(world_size, skips, transport):
        assert found == [([False, True, False], [16.0, 16.0, 8.0], True)] * len(STAGES)


def test_a_finite_gradient_whose_square_is_not_is_named_too() -> None:
    """Its norm would be infinite, or wrong."""
    with lowtide.initialize(torch.nn.Linear(4, 1).double(), settings()) as engine:
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float64)).sum() * 1e160)
        with pytest.raises(NonFiniteGradientError) as caught:
            engine.step()
    assert "found 1.0e+160, whose square is not, in the gradient of 'weight' on rank 0" in str(caught.value)


def test_what_another_stage_adds_to_a_tied_weight_is_not_this_ranks() -> None:
    group = Mock(full=torch.zeros(4), own=slice(0, 4))
    group.axes.states = group.axes.replicas = Mock(size=1, rank=0, ranks=(0,))
    stats = GradientStats(group)
    stats.look(group.axes.states, 0, torch.zeros(4), (), counts=False)
    assert stats.first(torch.zeros(4), is_own=True) is None
    total = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    stats.look(group.axes.states, 0, total, (), counts=True)
    found = stats.first(total, is_own=False)
    assert found is not None and found.rank is None
