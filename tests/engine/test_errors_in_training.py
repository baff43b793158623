"""After an error in a step, on all ranks alike, training goes on as if that step had not been."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool

FAULTS = ["forward", "backward", "loss", "end of the data", "NaN"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))

    def forward(self, x: Tensor, fault: str) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 1 and fault == "forward":
                raise ArithmeticError("a fault in forward")
            if index == 1 and fault == "backward":
                x.register_hook(fail)
        if fault == "loss":
            return x
        return x.square().mean() * (torch.nan if fault == "NaN" else 1)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("a fault in backward")


def microbatches(step: int, fault: str) -> Iterator[tuple[Tensor, str]]:
    """Two microbatches; the fault is in the second one."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    yield torch.randn(2, 20, generator=generator), ""
    if fault != "end of the data":
        yield torch.randn(2, 20, generator=generator), fault


def train(stage: int, transport: str, faults: list[str]) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses and parameters of two steps; after each of them a failing one for each fault."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "adamw"},
        "zero_optimization": {"stage": stage},
        "communication": {"transport": transport},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(Net(), config)
    losses, errors = [engine.train_step(microbatches(0, "")).loss.item()], []
    for fault in faults:
        try:
            engine.train_step(microbatches(0, fault))
        except (ArithmeticError, ValueError, RuntimeError) as error:
            errors.append(type(error).__name__)
    losses.append(engine.train_step(microbatches(1, "")).loss.item())
    state = engine.state_dict()
    engine.close()
    return losses, state, errors


def train_with_and_without(transport: str) -> list[tuple[Any, Any]]:
    return [(train(stage, transport, []), train(stage, transport, FAULTS)) for stage in range(4)]


@pytest.mark.parametrize(("transport", "world_size"), [("auto", 1), ("shared_memory", 2), ("sockets", 2)])
def test_a_failed_step_leaves_nothing_behind(ranks: RankPool, transport: str, world_size: int) -> None:
    kinds = ["ArithmeticError", "ArithmeticError", "ValueError", "ValueError", "NonFiniteGradientError"]
    for found in ranks(world_size, train_with_and_without, transport):
        for stage, ((losses, state, _), (losses_after, state_after, errors)) in enumerate(found):
            assert errors == kinds, stage
            assert losses_after == losses, stage
            assert all(torch.equal(state[name], state_after[name]) for name in state), stage
