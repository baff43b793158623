"""Recomputing activations inside a stage changes no bit, whoever asks for it."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.test_activation_checkpointing import AroundBlocksNonReentrant, AroundTwo, NonReentrant, Reentrant
from tests.kit import models
from tests.pipe.staged import staged, stages_of, whole

TOKENS = models.token_batch(0, 2)
CALL = lambda model: model(*TOKENS)  # noqa: E731


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("build", [Reentrant, NonReentrant, AroundBlocksNonReentrant, AroundTwo])
def test_checkpointing_by_the_model_is_bitwise_the_same(build: Callable[[], nn.Module], num_stages: int) -> None:
    expected = whole(seeded(models.TinyGPT), CALL)
    assert staged(stages_of(partial(seeded, build), num_stages), CALL).differences(expected) == []


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_of_the_blocks_of_a_stage_is_bitwise_the_same(every: int) -> None:
    expected = whole(seeded(models.TinyGPT), CALL)
    stages = stages_of(partial(seeded, models.TinyGPT), 2)
    calls: list[int] = []
    for stage in stages:
        for number in list(stage.plan.blocks_of(stage.index))[::every]:
            block = stage.module.get_submodule(stage.plan.blocks[number])
            forward = block.forward

            def counted(x: Tensor, number: int = number, forward: Callable[[Tensor], Tensor] = forward) -> Tensor:
                calls.append(number)
                return forward(x)

            block.forward = partial(checkpoint, counted, use_reentrant=False)
    assert staged(stages, CALL).differences(expected) == []
    assert sorted(calls) == ([0, 0, 1, 1, 2, 2] if every == 1 else [0, 0, 1, 1])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch says so too
def test_reentrant_checkpointing_around_a_block_is_refused_where_its_gradient_would_be_lost() -> None:
    class Around(models.TinyGPT):
        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            x = self.embedding(ids) + self.position
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    text = (
        "pipeline: 'blocks.2' is called without gradients, as reentrant checkpointing around a block does, so its "
        "input would get no gradient; checkpoint with use_reentrant=False, or set activation_checkpointing in the "
        "config"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        staged(stages_of(partial(seeded, Around), 2, [2, 1]), CALL)
