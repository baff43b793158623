"""Under a pipeline, stages 2 and 3 reduce the gradients of each microbatch: what is planned of it is what is done.

Those of an I by themselves, where the next ones come before its W and autograd would add them up in bfloat16.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lowtide
from lowtide.engine.plan.estimate import Estimate, MachineWork
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.pipelined import PipelineParts, ScheduleRun, fast_simulation_of
from lowtide.engine.plan.stages import Stages
from lowtide.pipe.messages import Messages
from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.schedule import Action, Op
from lowtide.zero.scheduled_units import ScheduledUnits
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.plan.counted import BF16, Case, config_of, profile_of

MICROBATCHES = 4


def done(schedule: str) -> list[str]:
    """What a rank does after its backwards, in a step of stage 2."""
    found: list[str] = []
    send = Messages.send

    def noting(name: str, word: str) -> Any:
        plain = getattr(ScheduledUnits, name)

        def noted(self: ScheduledUnits, stage: int) -> None:
            found.append(f"{word} {stage}")
            plain(self, stage)

        return patch.object(ScheduledUnits, name, noted)

    def sent(self: Messages, action: Action, tensors: list[torch.Tensor]) -> None:
        found.extend([f"send {action.stage}"] * (action.op is Op.SEND_B))
        send(self, action, tensors)

    pipeline = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
    case = Case("tied gpt", config_of(2, 0, MICROBATCHES, **pipeline, **BF16))
    with (
        lowtide.initialize(models.tied_gpt(), case.config) as engine,
        noting("collect", "collect"),
        noting("collect_half", "half"),
        noting("reduce", "reduce"),
        patch.object(Messages, "send", sent),
    ):
        engine.train_step(case.whole_batch)
    return found


def simulated(schedule: str, rank: int) -> list[str]:
    """The same by the schedule: whoever waits for a gradient waits for what is collected before it is sent too."""
    plan = make_schedule(schedule, 2, MICROBATCHES)
    actions = plan.actions[rank]
    left, found = Counter(action.stage for action in actions if action.op in (Op.B, Op.W)), []
    before: dict[int, Op] = {}  # by stage
    for action in actions:
        if action.op in (Op.B, Op.I) and before.get(action.stage) is Op.I:
            found.append(f"half {action.stage}")
        before |= {action.stage: action.op} if action.op in (Op.B, Op.I, Op.W) else {}
        if action.op in (Op.B, Op.W):
            left[action.stage] -= 1
            found += [f"collect {action.stage}"] if left[action.stage] else []
        if action.op in (Op.B, Op.I) and action.stage and plan.crosses(action.stage - 1):
            found.append(f"send {action.stage}")
        if action.op in (Op.B, Op.W) and not left[action.stage]:
            found.append(f"reduce {action.stage}")
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_are_collected_before_they_are_sent_and_reduced_behind(ranks: RankPool, schedule: str) -> None:
    found = [simulated(schedule, rank) for rank in range(2)]
    assert ranks(2, done, schedule) == found
    assert any("half" in did for of_rank in found for did in of_rank) == (schedule == "zb-h1")


def estimated(stage: int, machine: Machine) -> tuple[Estimate, PipelineParts, ScheduleRun]:
    case = Case("tied gpt", config_of(stage, 0, MICROBATCHES, parallel={"pipeline": 2}))
    blueprint, profile = profile_of(case, 0, 4)
    assert blueprint.pipeline is not None
    stages = Stages(blueprint.pipeline.split, profile, MachineWork(profile, machine))
    run = ScheduleRun.of(fast_simulation_of(blueprint.pipeline.schedule), stages.costs(0.0), MICROBATCHES)
    parts = PipelineParts(blueprint, machine)
    return parts.estimate(blueprint.config, stages, run), parts, run


def test_what_sends_is_what_computes_on_processors() -> None:
    machine = Machine(devices_per_host=4, device="cpu")
    (once, parts, run), (each, parts_of_each, _) = (estimated(stage, machine) for stage in (1, 2))
    assert parts.collecting(run) == ([0.0, 0.0], [0.0, 0.0])
    collecting, _ = parts_of_each.collecting(run)
    more = each.seconds["reduce exposed"] - once.seconds["reduce exposed"]
    least, most = min(collecting), max(collecting)
    # Three on the rank that ends last, and the first of the other one, for which it waits.
    assert 0 < MICROBATCHES * least <= more * (1 + 1e-9) and more <= MICROBATCHES * most * (1 + 1e-9)


@pytest.mark.parametrize(("speed", "is_exposed"), [(1e15, False), (1e3, True)])
def test_reductions_beside_the_next_microbatch_are_waited_for_where_they_take_longer(
    speed: float, is_exposed: bool
) -> None:
    machine = Machine(devices_per_host=4, intra=speed, intra_latency=0.0)
    _, parts, run = estimated(2, machine)
    collecting, halves = parts.collecting(run)
    assert [seconds > 0 for seconds in collecting] == [is_exposed] * 2
    assert (run.collecting(collecting, halves) > 0) == is_exposed
