"""A case that is planned as well as trained: a GPT, a config, and how many ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from _model import GPT, VOCABULARY, GPTSize
from torch import Tensor

from lowtide.engine.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.planning.choice import Choice
from lowtide.engine.planning.estimate import Estimate
from lowtide.engine.planning.machine import Machine
from lowtide.engine.planning.measured import Measured
from lowtide.engine.planning.meta_run import MetaRun
from lowtide.engine.planning.planner import Planner

_ENOUGH = 1e12  # bytes: nothing is left out for not fitting


@dataclass(frozen=True)
class Case:
    """config: with the microbatch. name: of this case among those it is ranked with; group: those."""

    group: str
    name: str
    ranks: int
    size: GPTSize
    config: dict[str, Any]

    def as_job(self) -> dict[str, Any]:
        """What a worker needs."""
        return asdict(self)


def build(size: GPTSize) -> GPT:
    """With weights of the same seed everywhere."""
    torch.manual_seed(0)
    return GPT(size)


def batch(size: GPTSize, rows: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), (rows, sequence) each."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(VOCABULARY, (rows, size.sequence_length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def estimate_of(case: Case, measured: Measured | None) -> Estimate:
    """Of the fullest rank. measured: without it the time means nothing, and bytes are the same."""
    if measured is not None:
        machine = Machine.measured(measured, case.ranks, _ENOUGH)
    else:
        machine = Machine(devices_per_host=case.ranks, device="cpu", device_bytes=_ENOUGH)
    with torch.device("meta"):
        model = GPT(case.size)
    config = Config.load(case.config)

    def runs(blueprint: Blueprint) -> MetaRun:
        return MetaRun(model, blueprint.units, blueprint.dtypes, "cpu")

    planner = Planner(model, config.as_dict(), machine, runs, batch(case.size, 1))
    return planner.estimate(Choice.of(config.resolve(case.ranks)))
