"""Trainings whose updates are delayed, step by step."""

from collections.abc import Callable
from typing import Any

import torch

import lowtide
from tests.kit.models import mlp, tiny_gpt, token_batch, vector_batch
from tests.kit.training import Case, share_of

GPT = Case(tiny_gpt, token_batch, steps=5)
MLP = Case(mlp, vector_batch, steps=5)
OWN = MLP.at(0, config={"optimizer": None})


def start(case: Case, **options: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    return lowtide.initialize(case.build(), case.as_config(), **options)


def take_steps(engine: lowtide.Engine, case: Case, first: int, end: int) -> list[float]:
    """The losses of steps number first, ..., end - 1."""
    batches = [share_of(case.global_batch(step, engine.world_size)) for step in range(first, end)]
    return [engine.train_step(batch).loss.item() for batch in batches]


class Sgd(torch.optim.SGD):
    """Plain SGD that calls something before each step, once the engine is built."""

    before_step: Callable[[], object] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        type(self).before_step()
        super().step(closure)
