"""update_in_backward gives the bits of the plain update, and never holds all gradients."""

import pytest
import torch
from torch import nn

import lowtide
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of, train_all

IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}
BF16 = {"bf16": {"enabled": True}}


def of_two_blocks() -> nn.Module:
    return models.TinyGPT(layers=2)


@pytest.mark.parametrize(("world_size", "transports"), [(1, ("auto",)), (2, ("shared_memory", "sockets"))])
def test_update_in_backward_equals_the_plain_update_bitwise(
    ranks: RankPool, world_size: int, transports: tuple[str, ...]
) -> None:
    """At each stage, on each transport: those of stage 0."""
    plain = [Case(of_two_blocks, models.token_batch, steps=2, config=dtype) for dtype in ({}, BF16)]
    grid = pairs((0, 1, 2, 3), transports, (0, 1))
    updated = [
        plain[narrow].at(stage, config={"communication": {"transport": transport}, **IN_BACKWARD})
        for stage, transport, narrow in grid
    ]
    found = ranks(world_size, train_all, [*plain, *updated])[0]
    for (*where, narrow), ours in zip(grid, found[2:], strict=True):
        assert ours.differences(found[narrow]) == [], (where, narrow)


class Watched(models.Mlp):
    """Eight layers, each a unit of one block for each shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(8)))


def most_gradient_bytes(config: dict[str, object]) -> tuple[int, int, int]:
    """Bytes of gradients: the most that engine.memory() saw in a backward, after the step, and of a full set."""
    torch.manual_seed(0)
    case = Case(Watched, models.vector_batch, config=config)
    engine = lowtide.initialize(Watched(), case.as_config())
    seen: list[int] = []
    hooks = [
        layer.register_full_backward_hook(lambda module, *_: seen.append(engine.memory().gradient_bytes))
        for layer in engine.module.layers  # type: ignore[union-attr]
    ]
    for step in range(2):
        engine.train_step(share_of(case.global_batch(step, engine.world_size)))
    for hook in hooks:
        hook.remove()
    full = sum(4 * shard.group.layout.padded_numel for shard in engine.optimizer.shards)
    after = engine.memory().gradient_bytes
    engine.close()
    return max(seen), after, full


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_update_in_backward_holds_few_gradients(ranks: RankPool, stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage, "update_in_backward": True}}
    for most, after, full in ranks(2, most_gradient_bytes, zero):
        assert after == 0
        assert most <= full / 2, f"{most} of {full}"
    without = {"zero_optimization": {"stage": stage}}
    for most, _, full in ranks(2, most_gradient_bytes, without):
        assert most >= full / 2 - 4 * 1024


class Poisoned(nn.Linear):
    """Gives a NaN to its weight's gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.where(x.sum() > 0, torch.tensor(float("nan")), torch.tensor(1.0))


def error_of_a_poisoned_step() -> str:
    config = {"optimizer": {"type": "sgd"}, **IN_BACKWARD, "steps_per_print": 0}
    model = nn.Sequential(nn.Linear(4, 4), Poisoned(4, 4))
    engine = lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean())
    with torch.no_grad(), engine.gathered(*model[0].parameters(), modify=True):
        for param in model[0].parameters():
            param.fill_(1.0)
    try:
        engine.train_step((torch.ones(2, 4),))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_nan_says_that_other_parameters_were_updated_already(ranks: RankPool) -> None:
    (text,) = ranks(1, error_of_a_poisoned_step)
    assert "step 0: expected finite gradients, found a NaN or infinite value in the gradient of '" in text
    assert "The parameters whose gradients are finite were updated already (update_in_backward)." in text
