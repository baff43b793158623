"""Trainings over pipelines, beside those of one process."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.pipe.schedules.grid import colour_grid
from lowtide.pipe.schedules.schedule import Action, Op, Schedule
from lowtide.pipe.schedules.simulator import Simulation
from tests.kit import models
from tests.kit.training import Case

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}  # name: chunks
MICROBATCHES = 4
TOLERANCE_64 = 1e-9


def with_steps(schedule: Schedule) -> Schedule:
    """Add a STEP of each stage at the end of its rank's list."""
    return schedule.replace_actions(
        [*actions, *(Action(Op.STEP, stage) for stage in schedule.stages_of_rank(rank))]
        for rank, actions in enumerate(schedule.actions)
    )


def schedule_of(*rows: str, ranks: tuple[int, ...] | None = None, microbatches: int = 1) -> Schedule:
    """One line of actions per rank; by default one stage on each."""
    placed = tuple(range(len(rows))) if ranks is None else ranks
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("own", len(rows), len(placed), microbatches, placed, actions)


def lines_of(schedule: Schedule) -> list[str]:
    """The actions of each rank."""
    return [" ".join(map(str, row)) for row in schedule.actions]


def text_grid(simulation: Simulation, width: int = 120) -> str:
    """What `colour_grid` draws, without colours and spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in colour_grid(simulation, width).plain.splitlines()) + "\n"


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule in their order, with their messages."""
    ops = (Op.F, Op.SEND_F, Op.RECV_F)
    return schedule.replace_actions([action for action in actions if action.op in ops] for actions in schedule.actions)


deep_gpt, deep_tied_gpt = partial(models.TinyGPT, layers=5), partial(models.TinyGPT, layers=5, tied=True)


def deep_gpt_64() -> nn.Module:
    """In float64: what remains between two orders of summation is far below what a mistake makes."""
    return deep_gpt().double()


def deep_tied_gpt_64() -> nn.Module:
    return deep_tied_gpt().double()


class TiedChain(nn.Module):
    """Six layers on three stages; those of 1 and 2 are tied, and those of 3 and 4: a rank's first tie is another
    one's second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 1)
        for first, second in ((1, 2), (3, 4)):
            self.blocks[second].weight = self.blocks[first].weight
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(self.head(x), y)


def chain_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 8, generator=generator).double(), torch.randn(rows, 1, generator=generator).double()


def pipelined(case: Case, num_ranks: int, schedule: str, **config: Any) -> Case:
    """The case over so many pipeline ranks; config may add to the section `pipeline`."""
    section = {"schedule": schedule, **config.pop("pipeline", {})}
    return case.at(case.stage, config={"parallel": {"pipeline": num_ranks}, "pipeline": section, **config})
