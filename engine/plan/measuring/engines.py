"""What an engine takes on the host, beside all that is measured on its own: by unit, and by step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from ....comm import World
from ...blueprint.blueprint import Blueprint
from ...build import initialize
from ...config.config import Config
from ..estimate import estimate, writes_gradients
from ..machine import Machine
from ..measured import Curve, Measured
from ..meta_run import MetaRun
from .calls import MeasuredBlock
from .operations import own_clock

_WIDTH, _TOKENS = 64, 16
_COUNTS = (8, 40)  # blocks
_ROUNDS, _STEPS = 3, 16  # of few blocks and of many, in turn: a machine is faster in some seconds than in others
_LEAST_SECONDS = 1e-7


class Small(nn.Module):
    """Blocks that compute next to nothing, with as many parameters each as most transformers have."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MeasuredBlock(_WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Products(nn.Module):
    """As many kinds of products as a transformer has, of a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(32, 96), (96, 32), (32, 128), (128, 32)]
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(*one) for one in widths)) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:  # (rows, tokens, 32)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def host_curves(measured: Measured, world: World) -> dict[str, Curve]:
    """Constants by name: "shared_memory unit 3" of a unit at stage 3, "shared_memory step 3" of a step.

    What a step of many small blocks takes longer than predicted of `measured`.
    """
    found = {}
    routes = ("shared_memory", "sockets") if world.size > 1 else ("solo",)
    for route in routes:
        for stage in (0, 1, 3):
            rounds = [[_lacking(measured, world, route, stage, count) for count in _COUNTS] for _ in range(_ROUNDS)]
            few, many = map(min, zip(*rounds, strict=True))
            unit = max(_LEAST_SECONDS, (many - few) / (_COUNTS[1] - _COUNTS[0]))
            step = max(_LEAST_SECONDS, few - _COUNTS[0] * unit)
            found[f"{route} unit {stage}"] = Curve((0.0,), (unit,))
            found[f"{route} step {stage}"] = Curve((0.0,), (step,))
    return found


def _lacking(measured: Measured, world: World, route: str, stage: int, count: int) -> float:
    """Seconds of a step that the prediction of it lacks."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "device": "cpu",
        "optimizer": {"type": "adamw", "params": {}},
        "zero_optimization": {"stage": stage, "units": [f"blocks.{number}" for number in range(count)]},
    }
    config |= {"communication": {"route": route}} if world.size > 1 else {}
    batch = (torch.ones(1, _TOKENS, _WIDTH),)
    model = Small(count)
    blueprint = Blueprint.of(Config.load(config).resolve(world.size), model, world.size)
    run = MetaRun(model, blueprint.units, blueprint.dtypes, "cpu")
    profile = run.profile(batch, 1, 0, writes_gradients(blueprint))
    machine = Machine.measured(measured, world.size, 1e12)
    predicted = estimate(blueprint, machine, profile).step_seconds
    with initialize(model, config) as engine:
        clock = own_clock() if world.size == 1 else time.perf_counter
        times = []
        for _ in range(_STEPS):
            start = clock()
            engine.train_step(batch)
            times.append(clock() - start)
    return min(times[2:]) - predicted
