"""One of three islands of one rank each, of which the first dies in the middle of an exchange."""

import os
import signal
from typing import Any
from unittest.mock import patch

import torch

import lowtide
from lowtide.comm.island_links import Links
from tests import models
from tests.engine.outer_training import Plan, batch_of
from tests.zero.training import Case

CASE = Case(models.tiny_gpt_float64, models.token_batch, stage=2, clip=0.5, steps=10)
PLAN = Plan(lost=(0, 8))


def train() -> None:
    """The others write what they have in the end.

    Rank 0 dies after step 8, when it has sent its values and has those of the others, and has sent no mean of them.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    swap, swaps = Links.swap, 0
    with lowtide.initialize(CASE.build(), {**CASE.as_config(), "outer": PLAN.as_config(1)}) as engine:

        def deadly(*arguments: Any) -> None:
            nonlocal swaps
            swaps += engine.global_step >= 7
            if swaps == 2 and engine.rank == 0 and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            swap(*arguments)

        with patch.object(Links, "swap", deadly):
            for step in range(CASE.steps):
                engine.train_step(batch_of(engine, CASE, step))
        torch.save(engine.state_dict(), f"island{os.environ['RANK']}.pt")
