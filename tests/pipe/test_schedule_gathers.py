"""Full parameters are gathered within a budget, with the fewest gathers there can be."""

from functools import cache

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.generators import layered, layered_evaluation
from lowtide.pipe.schedules.passes import add_gathers, complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.rules import check_rules
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal


def one_rank(row: str, num_stages: int, num_microbatches: int = 1) -> Schedule:
    actions = tuple(map(Action.parse, row.split()))
    return Schedule("own", 1, num_stages, num_microbatches, (0,) * num_stages, (actions,))


def text_of(schedule: Schedule) -> str:
    return " ".join(map(str, schedule.actions[0]))


def num_gathers(schedule: Schedule, rank: int = 0) -> int:
    return sum(action.op is Op.GATHER for action in schedule.actions[rank])


def fewest_gathers(stages: tuple[int, ...], budget: int) -> int:
    """By trying every choice."""

    @cache
    def rest(position: int, held: frozenset[int]) -> int:
        if position == len(stages):
            return 0
        stage = stages[position]
        if stage in held:
            return rest(position + 1, held)
        if len(held) < budget:
            return 1 + rest(position + 1, held | {stage})
        return 1 + min(rest(position + 1, held - {victim} | {stage}) for victim in held)

    return rest(0, frozenset())


@pytest.mark.parametrize("name", KINDS)
def test_without_a_budget_each_stage_is_gathered_once_from_its_first_use_to_its_last(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    for rank, row in enumerate(add_gathers(schedule).actions):
        assert tuple(action for action in row if action.op in COMPUTE_OPS) == schedule.actions[rank]
        for stage in schedule.stages_of_rank(rank):
            own = [action for action in row if action.stage == stage]
            assert (own[0], own[-1]) == (Action(Op.GATHER, stage), Action(Op.RELEASE, stage))
            assert sum(action.op is Op.GATHER for action in own) == 1


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("interleaved", 4), ("zb-h1", 3), ("zb-v", 2)])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_budget_holds_with_the_fewest_gathers(name: str, chunks: int, budget: int) -> None:
    for p, m in ((1, 4), (2, 4), (3, 7)):
        schedule = make_schedule(name, p, m, chunks)
        gathered = add_gathers(schedule, budget)
        costs = Costs.uniform(schedule.num_stages, parameter_bytes=1.0)
        for rank, peaks in enumerate(simulate(gathered, costs).peaks):
            assert peaks.parameter_bytes <= budget
            uses = tuple(action.stage for action in schedule.actions[rank])
            assert num_gathers(gathered, rank) == fewest_gathers(uses, budget)


def test_a_stage_is_gathered_for_a_run_of_uses_and_one_action_ahead_where_there_is_room() -> None:
    assert text_of(add_gathers(one_rank("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", 2, 2), 1)) == (
        "0GATHER 0F0 0F1 0RELEASE 1GATHER 1F0 1B0 1F1 1B1 1RELEASE 0GATHER 0B0 0B1 0RELEASE"
    )
    assert text_of(add_gathers(one_rank("0F0 1F0 2F0 2B0 1B0 0B0", 3), 2)) == (
        "0GATHER 1GATHER 0F0 0RELEASE 2GATHER 1F0 2F0 2B0 2RELEASE 0GATHER 1B0 1RELEASE 0B0 0RELEASE"
    )


def test_sizes_are_weighed_against_the_budget() -> None:
    schedule, sizes = one_rank("0F0 1F0 2F0 2B0 1B0 0B0", 3), (10.0, 1.0, 5.0)
    costs = Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (0.0,) * 3, (0.0,) * 3, sizes)
    gathered = add_gathers(schedule, 11.0, sizes)
    assert num_gathers(gathered) == 4  # stage 1 stays beside each of the others
    for one in (gathered, complete(schedule, costs, gathers=True, budget=11.0)):
        assert simulate(one, costs).peaks[0].parameter_bytes == 11


def test_what_cannot_be_gathered_is_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    assert refusal(add_gathers, schedule, 50.0, [40.0, 60.0]) == (
        "schedule 1f1b: expected parameters of stage 1 within the budget for gathered parameters, 50, found 60; "
        "raise the budget, or split the model over more stages"
    )
    assert "schedule 1f1b: expected no gathers and releases, found some" in refusal(add_gathers, add_gathers(schedule))


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            layered(3, 2, [True] * 3),
            "0GATHER 1GATHER 0F0 0F1 0RELEASE 2GATHER 1F0 1F1 1RELEASE 2F0 2F1 "
            "1GATHER 2B0 2B1 2REDUCE 2RELEASE 0GATHER 1B0 1B1 1REDUCE 1RELEASE 0B0 0B1 0REDUCE 0RELEASE",
        ),
        (
            layered(2, 2, [False] * 2),  # without room ahead
            "0GATHER 0F0 0F1 0RELEASE 1GATHER 1F0 1F1 1B0 1B1 1REDUCE 1RELEASE 0GATHER 0B0 0B1 0REDUCE 0RELEASE",
        ),
        (layered(2, 2), "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE 0B0 0B1 0REDUCE"),
        (layered_evaluation(2), "0F0 1F0"),
        (layered_evaluation(2, [True] * 2), "0GATHER 1GATHER 0F0 0RELEASE 1F0 1RELEASE"),
    ],
)
def test_layer_by_layer_all_microbatches_of_a_stage_come_before_the_next_stage(schedule: Schedule, text: str) -> None:
    assert text_of(schedule) == text


@pytest.mark.parametrize("ahead", [None, [True] * 5, [False] * 5, [True, False, True, False, True]])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_layer_by_layer_obeys_the_rules(ahead: list[bool] | None, num_microbatches: int) -> None:
    schedule = layered(5, num_microbatches, ahead)
    check_rules(schedule)
    check_rules(layered_evaluation(5, ahead))
    assert num_gathers(schedule) == (0 if ahead is None else 2 * 5 - 1), "whatever the number of microbatches"
    assert Schedule.from_text(schedule.to_text()) == schedule
