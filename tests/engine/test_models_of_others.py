"""Models as people have them train with nothing changed but a `loss_fn`, and as in plain torch."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.engine.models_of_others import FAMILIES, batch_of
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}  # a larger eps: gradients near 0 are rounding
STEPS = 2


@dataclass
class Outcome:
    losses: list[float]
    evaluation: float
    state: dict[str, Tensor]


@functools.cache
def train_plainly(name: str, world_size: int) -> Outcome:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = family.optimizer(model) if family.optimizer else torch.optim.AdamW(trained, **OPTIONS)
    losses = []
    for step in range(STEPS):
        batches = [batch_of(family.kind, step, rank) for rank in range(world_size)]
        loss = torch.stack([family.loss(model(*batch), batch) for batch in batches]).mean()
        loss.backward()
        for param in trained:
            if param.grad is not None and param.grad.is_sparse:  # which AdamW does not take
                param.grad = param.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    batch = batch_of(family.kind, STEPS, 0)
    with torch.no_grad():
        return Outcome(losses, family.loss(model(*batch), batch).item(), dict(model.state_dict()))


def train(name: str, stage: int, transport: str) -> Outcome:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build if family.from_callable else family.build()
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}, "communication": {"transport": transport}}
    optimizer = None
    if family.optimizer is not None:
        assert isinstance(model, torch.nn.Module)
        optimizer = family.optimizer(model)
    else:
        config["optimizer"] = {"type": "adamw", "params": OPTIONS}
    with lowtide.initialize(model, config, loss_fn=family.loss, optimizer=optimizer) as engine:
        losses = [engine.train_step(batch_of(family.kind, step, engine.rank)).loss.item() for step in range(STEPS)]
        return Outcome(losses, engine.eval_step(batch_of(family.kind, STEPS, 0)).item(), engine.state_dict())


def train_all(transport: str) -> dict[tuple[str, int], Outcome]:
    return {(name, stage): train(name, stage, transport) for name, stage, its in GRID if its == transport}


ROUTES = ("shared_memory", "sockets")
GRID = pairs(list(FAMILIES), (0, 3), ROUTES)


@pytest.mark.parametrize("transport", ROUTES)
def test_models_of_others_train_as_in_plain_torch(ranks: RankPool, transport: str) -> None:
    for (name, stage), found in ranks(2, train_all, transport)[0].items():
        expected = replace(train_plainly(name, 2), state=dict(train_plainly(name, 2).state))
        for key in [key for key in expected.state if "running_" in key or "num_batches" in key]:
            del found.state[key], expected.state[key]  # each rank has its own
            found.evaluation = expected.evaluation = math.nan
        what = f"{name}, stage {stage}: {{}}".format
        torch.testing.assert_close(vars(found), vars(expected), rtol=1e-4, atol=2e-5, equal_nan=True, msg=what)
